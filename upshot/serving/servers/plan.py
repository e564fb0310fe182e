"""Plans for each server its GPUs, its share of their memory, its port and its command line. Starts nothing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from upshot.core.errors import UserError
from upshot.core.http_listener import listen
from upshot.serving.servers.file import ServerConfig, ServersConfig

SPARE = Fraction(9, 10)
"""Servers without a given share divide this, minus the given shares; drivers need the rest."""
VLLM_KEY, UPSHOT_KEY = "VLLM_API_KEY", "UPSHOT_API_KEY"
"""The environment variable in which each engine expects the key that clients must send."""


@dataclass(frozen=True)
class Command:
    """A command line with its environment."""

    words: list[str]
    environment: dict[str, str]


def visible_gpus() -> list[str]:
    """The GPUs of this machine as CUDA names them, without those that CUDA_VISIBLE_DEVICES hides."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(number) for number, _ in enumerate(sorted(folder.iterdir()))] if folder.is_dir() else []


def place_servers(servers: Mapping[str, ServerConfig], gpus: Sequence[str]) -> dict[str, list[int]]:
    """The GPUs of each server, by number; none: the CPU."""
    out = {}
    for name, server in servers.items():
        wanted = ([0] if gpus else []) if server.devices == "auto" else server.devices
        out[name] = [] if wanted == "cpu" else [int(number) for number in wanted]
        absent = [number for number in out[name] if number >= len(gpus)]
        if absent:
            names = f"GPUs 0 to {len(gpus) - 1}" if len(gpus) > 1 else "GPU 0 only" if gpus else "no GPU"
            raise UserError(f"servers.{name}.devices: there is no GPU {absent[0]} here ({names}); name another, or cpu")
        if server.memory is not None and not out[name]:
            raise UserError(f"servers.{name}.memory is a share of a GPU, but there is none here; leave it out")
    return out


def divide_memory(servers: Mapping[str, ServerConfig], places: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Each server's share of the memory of its GPUs; a sum over 1 on any of them is refused with the arithmetic."""
    # As decimal numbers, so that 0.1 + 0.2 + 0.7 is exactly 1.
    out = {n: Fraction(str(s.memory)) for n, s in servers.items() if s.memory is not None and places[n]}
    open_to: dict[str, Fraction] = {}
    for gpu in sorted({number for numbers in places.values() for number in numbers}):
        here = [name for name in servers if gpu in places[name]]
        shares = sum((out[name] for name in here if name in out), Fraction(0))
        free = [name for name in here if name not in out]
        detail = " + ".join(f"{name} {servers[name].memory:g}" for name in here if name in out)
        if shares > 1:
            raise UserError(
                f"GPU {gpu}: {detail} = {float(shares):g} of its memory, more than 1; lower `memory`, or move a server"
            )
        if free and shares >= SPARE:
            raise UserError(
                f"GPU {gpu}: {detail} = {float(shares):g} of its memory; nothing of {float(SPARE):g} is left for "
                f"{', '.join(free)}; give them a share of `memory` too, or another device"
            )
        for name in free:
            part = (SPARE - shares) / len(free)
            open_to[name] = min(open_to.get(name, part), part)
    return {name: float(share) for name, share in {**out, **open_to}.items()}


def pick_ports(config: ServersConfig) -> dict[str, int]:
    """A port for each server: the requested one if it is free, or any."""
    ports: dict[str, int] = {}
    with ExitStack() as held:  # hold all at once, so that no free port is given twice
        for name, server in config.servers.items():
            try:
                listener = held.enter_context(listen(config.host, 0 if server.port == "auto" else int(server.port)))
            except UserError as error:
                raise UserError(f"servers.{name}: {error}") from error
            ports[name] = listener.getsockname()[1]
    return ports


def compose(
    config: ServersConfig, name: str, port: int, gpus: Sequence[str], share: float | None, inherited: Mapping[str, str]
) -> Command:
    """The command of a server. `gpus`: its devices as CUDA names them, none: the CPU; `inherited`: our environment.

    The key is passed in the environment, because everybody on the machine can read a command line.
    """
    server = config.servers[name]
    where = ["--host", config.host, "--port", str(port)]
    environment = {**inherited, "CUDA_VISIBLE_DEVICES": ",".join(gpus), **server.environment}
    for variable in (VLLM_KEY, UPSHOT_KEY):
        environment.pop(variable, None)
    if config.key:
        environment[VLLM_KEY if server.engine == "vllm" else UPSHOT_KEY] = config.key
    if server.engine == "vllm":
        words = [server.program, "serve", server.model, *where, "--served-model-name", config.asked_as(name)]
        words += ["--gpu-memory-utilization", f"{share:.4g}"] if share is not None else []
        words += ["--tensor-parallel-size", str(len(gpus))] if len(gpus) > 1 else []
    else:
        words = [sys.executable, "-m", "upshot.cli", "serve", server.model, *where, "--name", config.asked_as(name)]
        words += ["--device", "cuda", "--memory", f"{share:.4g}"] if share is not None else ["--device", "cpu"]
    return Command([*words, *server.arguments], environment)


def check_program(config: ServersConfig) -> None:
    """Refuse a vLLM that is not installed, before anything starts."""
    for name, server in config.servers.items():
        if server.engine == "vllm" and shutil.which(server.program) is None:
            raise UserError(
                f"servers.{name}: there is no program '{server.program}'; install vLLM, set `program: …/bin/vllm`, or "
                "set engine: upshot"
            )
