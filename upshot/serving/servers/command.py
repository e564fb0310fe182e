"""A server's command line and environment. Nothing is started here."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from upshot.core.errors import UserError
from upshot.serving.servers.file import ServersConfig

VLLM_KEY, UPSHOT_KEY = "VLLM_API_KEY", "UPSHOT_API_KEY"


@dataclass(frozen=True)
class Command:
    """What is executed."""

    words: list[str]
    environment: dict[str, str]


def compose(
    fleet: ServersConfig, name: str, port: int, gpus: Sequence[str], share: float | None, inherited: Mapping[str, str]
) -> Command:
    """The command of a server. `gpus`: its devices as CUDA names them, none: the CPU; `inherited`: our environment.

    The key goes by the environment: everybody on the machine can read a command line.
    """
    server = fleet.servers[name]
    where = ["--host", fleet.host, "--port", str(port)]
    environment = {**inherited, "CUDA_VISIBLE_DEVICES": ",".join(gpus), **server.environment}
    for variable in (VLLM_KEY, UPSHOT_KEY):
        environment.pop(variable, None)
    if fleet.key:
        environment[VLLM_KEY if server.engine == "vllm" else UPSHOT_KEY] = fleet.key
    if server.engine == "vllm":
        words = [server.program, "serve", server.model, *where, "--served-model-name", fleet.asked_as(name)]
        words += ["--gpu-memory-utilization", f"{share:.4g}"] if share is not None else []
        words += ["--tensor-parallel-size", str(len(gpus))] if len(gpus) > 1 else []
    else:
        words = [sys.executable, "-m", "upshot.cli", "serve", server.model, *where, "--name", fleet.asked_as(name)]
        words += ["--device", "cuda", "--memory", f"{share:.4g}"] if share is not None else ["--device", "cpu"]
    return Command([*words, *server.arguments], environment)


def check_program(fleet: ServersConfig) -> None:
    """Refuse a vLLM that is not there, before anything starts."""
    for name, server in fleet.servers.items():
        if server.engine == "vllm" and shutil.which(server.program) is None:
            raise UserError(
                f"servers.{name}: there is no program '{server.program}'; install vLLM, say `program: …/bin/vllm`, or "
                "take engine: upshot"
            )


def tail(log: Path, lines: int = 8) -> str:
    """The end of a log, for the message about a server that did not start."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        text = file.read().decode(errors="replace")
    return " | ".join(line.strip() for line in text.splitlines()[-lines:] if line.strip())
