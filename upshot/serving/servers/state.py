"""What is known of a fleet from outside: a folder beside the serve file with state, logs and two locks.

The kernel drops a lock when its holder dies, however it dies, so nothing here can be stale: a fleet is up while
somebody holds `fleet.lock`; runs that use it hold `users.lock` together.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from upshot.config.model_spec import ModelSpec
from upshot.core.errors import UserError, did_you_mean
from upshot.core.files import write_json
from upshot.serving.servers.file import digest, read

STATE, FLEET_LOCK, USERS_LOCK = "state.json", "fleet.lock", "users.lock"
SERVED = "serve:"
"""`serve:NAME` is a model of the recipe's fleet."""
POLL_S = 0.1


def folder_of(file: str | Path) -> Path:
    """Where a serve file's state and logs are: servers.yaml → servers.fleet/."""
    return Path(file).expanduser().resolve().with_suffix(".fleet")


@contextmanager
def lock(path: Path, kind: int) -> Iterator[bool]:
    """Hold a lock of `fcntl.flock`; whether it was to be had (always, where `kind` waits for it)."""
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
    """Whether somebody watches the fleet now."""
    if not (folder / FLEET_LOCK).exists():
        return False
    with lock(folder / FLEET_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
        return not free


def read_state(folder: Path) -> dict[str, Any] | None:
    """The state of a fleet that is up; None: it is not, or has not said anything yet."""
    if not is_up(folder):
        return None
    try:
        state = json.loads((folder / STATE).read_text())
    except FileNotFoundError:
        return None
    return dict(state)


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Tell how the fleet stands."""
    write_json(folder / STATE, state)


def ready(state: Mapping[str, Any] | None) -> bool:
    """Whether all servers run."""
    return state is not None and all(server["status"] == "running" for server in state["servers"].values())


def stop(file: str | Path, within_s: float = 60.0) -> bool:
    """Stop a fleet and wait until it is down; whether it was up."""
    folder = folder_of(file)
    deadline = time.monotonic() + within_s
    state = read_state(folder)
    while state is None and is_up(folder) and time.monotonic() < deadline:  # it has only just begun
        time.sleep(POLL_S)
        state = read_state(folder)
    if state is None:
        return False
    if state["machine"] != socket.gethostname():
        raise UserError(f"'{file}' is up on {state['machine']} (process {state['pid']}); stop it there")
    os.kill(state["pid"], signal.SIGTERM)
    while is_up(folder):
        if time.monotonic() > deadline:
            raise UserError(f"process {state['pid']} still has servers of '{file}' after {within_s:g} s; see {folder}")
        time.sleep(POLL_S)
    return True


def served_name(spec: ModelSpec) -> str | None:
    """The server that a spec means, if it means one."""
    return spec.model.removeprefix(SERVED) if spec.kind == "served" else None


def with_addresses(file: str | None, models: Mapping[str, ModelSpec]) -> dict[str, ModelSpec]:
    """The models with `serve:NAME` replaced by the address of that server in the fleet that is up."""
    return {role: _addressed(spec, f"models.{role}", file) for role, spec in models.items()}


def _addressed(spec: ModelSpec, where: str, file: str | None) -> ModelSpec:
    name = served_name(spec)
    if name is None:
        return spec
    if file is None:
        raise UserError(f"{where} is '{spec.model}', and the recipe names no serve file; set `serve: FILE.yaml`")
    state = read_state(folder_of(file))
    if state is None:
        raise UserError(f"the servers of '{file}' are not up; `upshot serve {file}` starts them")
    check_text(file, state)
    check_server(where, name, {server["asked_as"] for server in state["servers"].values()}, file)
    urls = [server["url"] for server in state["servers"].values() if server["asked_as"] == name]
    key = {"api_key_env": state["api_key_env"]} if state["api_key_env"] and not spec.api_key_env else {}
    said = spec.model_dump(exclude_unset=True)
    return ModelSpec.parse({**said, "url": urls, "model": name, **key}, where)


def check_server(where: str, name: str, known: Collection[str], file: str) -> None:
    """Refuse a server that the serve file does not name."""
    if name not in known:
        raise UserError(f"{where}: '{file}' names no server '{name}'; {did_you_mean(name, known)}")


def check_served(file: str | None, models: Mapping[str, ModelSpec]) -> None:
    """Refuse, before any work, a serve file that cannot be read and models that it does not serve."""
    fleet = read(file) if file is not None else None
    for role, spec in models.items():
        if (name := served_name(spec)) is None:
            continue
        if fleet is None or file is None:
            _addressed(spec, f"models.{role}", None)
        else:
            check_server(f"models.{role}", name, set(map(fleet.asked_as, fleet.servers)), file)


def check_text(file: str | Path, state: Mapping[str, Any]) -> None:
    """Refuse a fleet that was started from another text than the file has now."""
    if state["digest"] != digest(file):
        raise UserError(
            f"'{file}' has changed since its servers came up (process {state['pid']}); `upshot serve stop {file}`, "
            "then start them again"
        )
