"""The state of servers, as other processes see it: a folder with state, logs and two locks; and how a run uses servers.

The kernel drops a lock when its holder dies, however it dies, so nothing here can be stale. The supervisor alone holds
`supervisor.lock`: servers are up while somebody holds it, and `state.json` is valid only during that time. Runs share
`users.lock` (`lease`). Servers that a run started end themselves as soon as nobody holds it, so a killed run leaves
nothing behind; servers that were started by hand (`upshot serve FILE.yaml`) stay. A supervisor that ends because nobody
uses its servers holds `users.lock` alone until it is gone: a run that starts in that moment waits, and then starts its
own servers instead of using some that are about to end.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from upshot.config.model_spec import ModelSpec
from upshot.core.errors import UserError, did_you_mean
from upshot.serving.servers.file import digest, read
from upshot.serving.servers.server import GRACE_S

STATE, SUPERVISOR_LOCK, USERS_LOCK = "state.json", "supervisor.lock", "users.lock"
LOG = "_supervisor.log"
"""Prefix of the supervisor's own lines if a run has started it; no server's name begins with it."""
SUFFIX = ".serve"
SERVED = "serve:"
"""`serve:NAME` is a model on the recipe's servers."""
ANYWHERE = ("0.0.0.0", "::")
"""Hosts of servers that listen for other machines, too."""
POLL_S = 0.1


def folder_of(file: str | Path) -> Path:
    """The folder of a serve file's state and logs: servers.yaml → servers.serve/."""
    return Path(file).expanduser().resolve().with_suffix(SUFFIX)


@contextmanager
def lock(path: Path, kind: int) -> Iterator[bool]:
    """Hold a lock of `fcntl.flock`; whether it could be taken (always, if `kind` waits for it)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"cannot write '{path}' ({error.strerror}); the serve file's folder holds state and logs"
        ) from None
    try:
        try:
            fcntl.flock(handle, kind)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def is_up(folder: Path) -> bool:
    """Whether a supervisor watches the servers now."""
    if not (folder / SUPERVISOR_LOCK).exists():
        return False
    with lock(folder / SUPERVISOR_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
        return not free


def read_state(folder: Path) -> dict[str, Any] | None:
    """The state of a running supervisor; None: none is running, or it has not written its state yet."""
    if not is_up(folder):
        return None
    try:
        state = json.loads((folder / STATE).read_text())
    except FileNotFoundError:
        return None
    return dict(state)


def ready(state: Mapping[str, Any] | None) -> bool:
    """Whether all servers run."""
    return state is not None and all(server["status"] == "running" for server in state["servers"].values())


def stop(file: str | Path, within_s: float = 60.0) -> bool:
    """Stop the servers of a file and wait until they are down; whether they were up."""
    folder = folder_of(file)
    deadline = time.monotonic() + within_s
    while (state := read_state(folder)) is None:
        if not is_up(folder) or time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)  # it has only just started
    if state["machine"] != socket.gethostname():
        raise UserError(f"'{file}' is running on {state['machine']} (process {state['pid']}); stop it there")
    os.kill(state["pid"], signal.SIGTERM)
    while is_up(folder):
        if time.monotonic() > deadline:
            raise UserError(f"process {state['pid']} still has servers of '{file}' after {within_s:g} s; see {folder}")
        time.sleep(POLL_S)
    return True


def served_name(spec: ModelSpec) -> str | None:
    """The server that a spec names, if it names one."""
    return spec.model.removeprefix(SERVED) if spec.kind == "served" else None


def with_addresses(
    file: str | None, models: Mapping[str, ModelSpec], from_elsewhere: bool = False
) -> dict[str, ModelSpec]:
    """The models with `serve:NAME` replaced by the address of that server, which must be running.

    `from_elsewhere`: use the machine's name if the servers listen for other machines.
    """
    return {role: _add_address(spec, f"models.{role}", file, from_elsewhere) for role, spec in models.items()}


def _add_address(spec: ModelSpec, where: str, file: str | None, from_elsewhere: bool = False) -> ModelSpec:
    name = served_name(spec)
    if name is None:
        return spec
    if file is None:
        raise UserError(f"{where} is '{spec.model}', but the recipe names no serve file; set `serve: FILE.yaml`")
    state = read_state(folder_of(file))
    if state is None:
        raise UserError(f"the servers of '{file}' are not running; `upshot serve {file}` starts them")
    check_text(file, state)
    check_server(where, name, {server["asked_as"] for server in state["servers"].values()}, file)
    urls = [server["url"] for server in state["servers"].values() if server["asked_as"] == name]
    if from_elsewhere and state["host"] in ANYWHERE:
        urls = [f"http://{state['machine']}:{urlsplit(url).port}/v1" for url in urls]
    key = {"api_key_env": state["api_key_env"]} if state["api_key_env"] and not spec.api_key_env else {}
    return ModelSpec.parse({**spec.model_dump(exclude_unset=True), "url": urls, "model": name, **key}, where)


def check_server(where: str, name: str, known: Collection[str], file: str) -> None:
    """Refuse a server that the serve file does not name."""
    if name not in known:
        raise UserError(f"{where}: '{file}' names no server '{name}'; {did_you_mean(name, known)}")


def check_served(file: str | None, models: Mapping[str, ModelSpec]) -> None:
    """Refuse, before any work, a serve file that cannot be read and models that it does not serve."""
    config = read(file) if file is not None else None
    for role, spec in models.items():
        if (name := served_name(spec)) is None:
            continue
        if config is None or file is None:
            _add_address(spec, f"models.{role}", None)
        else:
            check_server(f"models.{role}", name, set(map(config.asked_as, config.servers)), file)


def check_text(file: str | Path, state: Mapping[str, Any]) -> None:
    """Refuse servers that were started from a different text of the file."""
    if state["digest"] != digest(file):
        raise UserError(
            f"'{file}' has changed since its servers came up (process {state['pid']}); `upshot serve stop {file}`, "
            "then start them again"
        )


@contextmanager
def lease(file: str | None, say: Callable[[str], None]) -> Iterator[None]:
    """Keep the servers of a file running meanwhile; does nothing without a file."""
    if file is None:
        yield
        return
    started: subprocess.Popen[bytes] | None = None
    folder = folder_of(file)
    within_s = read(file).start_s
    try:
        with lock(folder / USERS_LOCK, fcntl.LOCK_SH):
            if not is_up(folder):
                say(f"servers    starting those of {file} (logs: {folder})")
                started = _start(file, folder)
            state = _wait(file, folder, started, within_s)
            say("servers    " + ", ".join(f"{name} {server['url']}" for name, server in state["servers"].items()))
            yield
    finally:
        if started is not None and _nobody_else(folder):
            # It ends by itself unless another run uses it. Wait for that: whatever runs next needs its memory.
            with suppress(subprocess.TimeoutExpired):
                started.wait(2 * GRACE_S)


def _start(file: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the supervisor in its own session: a Ctrl-C that makes a run save must not end its helpers first."""
    words = [sys.executable, "-m", "upshot.cli", "serve", str(Path(file).resolve()), "--while-used"]
    with (folder / LOG).open("wb") as log:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _wait(file: str, folder: Path, started: subprocess.Popen[bytes] | None, within_s: float) -> dict[str, Any]:
    """The state once all servers run, even if another run started them in the same moment."""
    deadline = time.monotonic() + within_s + 30
    while time.monotonic() < deadline:
        ended = started is None or started.poll() is not None
        up = is_up(folder)
        if (state := read_state(folder)) is not None:
            check_text(file, state)
            if ready(state):
                return state
        if ended and not up and not is_up(folder):
            raise UserError(f"the servers of '{file}' did not start: {tail(folder / LOG)}")
        time.sleep(POLL_S)
    raise UserError(f"the servers of '{file}' are not all running after {within_s:g} s; `upshot serve status {file}`")


def _nobody_else(folder: Path) -> bool:
    with lock(folder / USERS_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
        return free


def tail(log: Path, lines: int = 8) -> str:
    """The end of a log, for the message about a server that did not start."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        text = file.read().decode(errors="replace")
    return " | ".join(line.strip() for line in text.splitlines()[-lines:] if line.strip())
