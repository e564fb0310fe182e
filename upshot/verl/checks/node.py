"""What one machine must have before verl's processes start there: looked at here, and by a task on every node."""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

SHM_GB = 1.0
"""Shared memory that Ray's object store and the weights' transport want at the very least."""
CONNECT_S, IMPORT_S = 5.0, 600.0
VALUE_HEADS = ("experimental/ppo", "models/modeling_value_head.py")
"""Where TRL has its value head, as long as it has one."""
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class NodeRequirements:
    """What a run needs on every node; plain data, so that it travels."""

    model: str
    """Folder of the model, or its name at the hub."""
    folder: str
    """The run folder, which must be the same one everywhere; empty: not made yet."""
    files: tuple[tuple[str, str], ...] = ()
    """Recipe keys, and files or folders that they name."""
    endpoints: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    """Environment variables with the endpoints' keys."""
    plugins: tuple[str, ...] = ()
    """Modules that verl imports, silently where it fails."""
    ports: tuple[int, ...] = ()
    """Those that somebody named and that will be taken here."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For the imports."""
    mark: str = ""
    """What must stand in a file of the run folder: written on the driver's node, read on all."""


def check_node(wanted: NodeRequirements) -> list[str]:
    """What is wrong on this machine."""
    checks = (_model, _storage, _files, _endpoints, _keys, _plugins, _trl, _memory, _ports)
    return [problem for check in checks for problem in check(wanted)]


def _model(wanted: NodeRequirements) -> Iterator[str]:
    path = Path(wanted.model)
    if not wanted.model or (not path.is_absolute() and not path.exists()):
        return  # a name of the hub; the driver has looked it up, a node without network must have it in its cache
    if not path.is_dir():
        yield f"the model folder {path} is not there; put it on storage that all nodes share, or at this path on each"
        return
    if not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):  # an adapter is merged
        yield f"the model folder {path} has no config.json"
    if not any((path / name).is_file() for name in TOKENIZERS):
        yield f"the model folder {path} has no tokenizer ({', '.join(TOKENIZERS)})"


def _storage(wanted: NodeRequirements) -> Iterator[str]:
    if not wanted.folder:
        return
    folder = Path(wanted.folder)
    way_out = "set run_dir to storage that all nodes share"
    if not folder.is_dir():
        yield f"the run folder {folder} is not there; {way_out}"
        return
    if wanted.mark and not (folder / wanted.mark).is_file():
        yield f"the run folder {folder} is another one than the driver's; {way_out}"
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        probe.write_text("probe")
        probe.unlink()
    except OSError as error:
        yield f"the run folder {folder} cannot be written ({error.strerror}); {way_out}"
    free = shutil.disk_usage(folder).free
    if free < 1e9:
        yield f"the run folder {folder} has {free / 1e9:.1f} GB left; checkpoints need more"


def _files(wanted: NodeRequirements) -> Iterator[str]:
    for key, path in wanted.files:
        if path != wanted.model and not Path(path).exists():
            yield f"{path} (`{key}`) is not there; put it on storage that all nodes share, or at this path on each"


def _endpoints(wanted: NodeRequirements) -> Iterator[str]:
    for url in wanted.endpoints:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), CONNECT_S).close()
        except OSError as error:
            yield (
                f"the endpoint {url} cannot be reached from here ({error.strerror or error}); is it listening on an "
                "address that other nodes see (not 127.0.0.1), and open in the firewall?"
            )


def _keys(wanted: NodeRequirements) -> Iterator[str]:
    for name in wanted.keys:
        if not os.environ.get(name):
            yield f"the key {name} is not set for Ray's processes here; export it where `ray start` is run"


def _plugins(wanted: NodeRequirements) -> Iterator[str]:
    """Import as verl will, in a process of its own: nothing of it stays in this one."""
    if not wanted.plugins:
        return
    env = {**wanted.environment, **os.environ, "PYTHONPATH": wanted.environment.get("PYTHONPATH", "")}
    words = [sys.executable, "-c", IMPORTS, *wanted.plugins]
    try:
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        yield f"the plug-ins {', '.join(wanted.plugins)} were not imported within {IMPORT_S:.0f} s"
        return
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    failed = [line.removeprefix(FAILED) for line in done.stdout.splitlines() if line.startswith(FAILED)]
    for problem in failed or ([f"{wanted.plugins[0]}' cannot be imported: {last}"] if done.returncode else []):
        yield f"the plug-in '{problem}; verl would continue without it and fail later"


FAILED = "upshot cannot import "
IMPORTS = f"""
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        print(f"{FAILED}{{name}}' cannot be imported: {{type(error).__name__}}: {{error}}".replace(chr(10), " "))
"""


def _trl(_: NodeRequirements) -> Iterator[str]:
    """verl 0.9.1 imports the value head of TRL wherever TRL is installed."""
    trl = find_spec("trl") if find_spec("verl") else None
    folder = Path(trl.origin).parent if trl is not None and trl.origin is not None else None
    if folder is not None and not any((folder / place).exists() for place in VALUE_HEADS):
        yield (
            "TRL is installed here and has no AutoModelForCausalLMWithValueHead, which verl imports from it where it "
            "finds TRL: pip uninstall trl, or give verl an environment of its own"
        )


def _memory(_: NodeRequirements) -> Iterator[str]:
    shm = Path("/dev/shm")
    free = shutil.disk_usage(shm).free / 2**30 if shm.is_dir() else math.inf
    if free < SHM_GB:
        yield (
            f"/dev/shm has {free:.2f} GB left, {SHM_GB:g} are wanted; in Docker: --shm-size=16g, in Kubernetes: an "
            "emptyDir with medium Memory"
        )


def _ports(wanted: NodeRequirements) -> Iterator[str]:
    for port in wanted.ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                yield f"port {port} is taken ({error.strerror}); another run? name another, or leave it out"


def write_mark(folder: Path) -> str:
    """Write the mark that the other nodes look for; its name."""
    name = f".here-{int(time.time())}-{uuid.uuid4().hex[:8]}"
    (folder / name).write_text(socket.gethostname())
    return name
