"""Checks what one machine needs before verl's processes start there: on this one, and by a task on every node."""

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
"""The least shared memory that Ray's object store and the transport of weights need."""
CONNECT_S, IMPORT_S = 5.0, 600.0
VALUE_HEADS = ("experimental/ppo", "models/modeling_value_head.py")
"""The module of TRL's value head, in versions that have one."""
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class NodeRequirements:
    """What a run needs on every node; plain data, so that it can be sent to other nodes."""

    model: str
    """Folder of the model, or its name at the hub."""
    folder: str
    """The run folder, which must be the same one everywhere; empty: it does not exist yet."""
    files: tuple[tuple[str, str], ...] = ()
    """Recipe keys, and the files or folders that they name."""
    endpoints: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    """Environment variables with the endpoints' keys."""
    plugins: tuple[str, ...] = ()
    """Modules that verl imports; it ignores failures."""
    ports: tuple[int, ...] = ()
    """Given ports that the run will use on this machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For the imports."""
    mark: str = ""
    """The content of a file in the run folder, which the driver's node writes and all nodes must see."""


def check_node(wanted: NodeRequirements) -> list[str]:
    """The problems of this machine."""
    checks = (_model, _storage, _files, _endpoints, _keys, _plugins, _trl, _memory, _ports)
    return [problem for check in checks for problem in check(wanted)]


def _model(wanted: NodeRequirements) -> Iterator[str]:
    path = Path(wanted.model)
    if not wanted.model or (not path.is_absolute() and not path.exists()):
        return  # a hub name: the driver has looked it up; a node without network must have it in its cache
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
        yield f"the run folder {folder} is not the same folder as the driver's; {way_out}"
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
    """Import the plug-ins as verl will, in a separate process, so that nothing stays in this one."""
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
            "TRL is installed here, but without AutoModelForCausalLMWithValueHead, which verl imports if it finds TRL: "
            "pip uninstall trl, or install verl in a separate environment"
        )


def _memory(_: NodeRequirements) -> Iterator[str]:
    shm = Path("/dev/shm")
    free = shutil.disk_usage(shm).free / 2**30 if shm.is_dir() else math.inf
    if free < SHM_GB:
        yield (
            f"/dev/shm has {free:.2f} GB left, but {SHM_GB:g} are needed; in Docker: --shm-size=16g, in Kubernetes: an "
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
    """Write the mark that the other nodes look for; returns its name."""
    name = f".here-{int(time.time())}-{uuid.uuid4().hex[:8]}"
    (folder / name).write_text(socket.gethostname())
    return name
