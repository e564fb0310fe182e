"""Who gets how much of which GPU: planned before anything starts. Arithmetic only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from upshot.core.errors import UserError
from upshot.serving.servers.file import ServerConfig

SPARE = Fraction(9, 10)
"""What servers without a share of their own divide, with the shares that are given taken off: drivers need some."""


def visible_gpus() -> list[str]:
    """The GPUs of this machine as CUDA names them, those that CUDA_VISIBLE_DEVICES leaves out left out."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(number) for number, _ in enumerate(sorted(folder.iterdir()))] if folder.is_dir() else []


def placed(servers: Mapping[str, ServerConfig], gpus: Sequence[str]) -> dict[str, list[int]]:
    """The GPUs of each server by number; none: the CPU."""
    out = {}
    for name, server in servers.items():
        wanted = ([0] if gpus else []) if server.devices == "auto" else server.devices
        out[name] = [] if wanted == "cpu" else [int(number) for number in wanted]
        absent = [number for number in out[name] if number >= len(gpus)]
        if absent:
            there = f"GPUs 0 to {len(gpus) - 1}" if len(gpus) > 1 else "GPU 0 only" if gpus else "no GPU"
            raise UserError(f"servers.{name}.devices: there is no GPU {absent[0]} here ({there}); or say cpu")
        if server.memory is not None and not out[name]:
            raise UserError(f"servers.{name}.memory is a share of a GPU, and there is none here; leave it out")
    return out


def shares(servers: Mapping[str, ServerConfig], places: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Each server's share of the memory of its GPUs; a sum over 1 on any of them is refused with the arithmetic."""
    out: dict[str, Fraction] = {n: _exact(s.memory) for n, s in servers.items() if s.memory is not None and places[n]}
    open_to: dict[str, Fraction] = {}
    for gpu in sorted({number for numbers in places.values() for number in numbers}):
        here = [name for name in servers if gpu in places[name]]
        given = sum((out[name] for name in here if name in out), Fraction(0))
        free = [name for name in here if name not in out]
        told = " + ".join(f"{name} {servers[name].memory:g}" for name in here if name in out)
        if given > 1:
            raise UserError(f"GPU {gpu}: {told} = {float(given):g} of its memory, over 1; lower `memory`, or move one")
        if free and given >= SPARE:
            raise UserError(
                f"GPU {gpu}: {told} = {float(given):g} of its memory leaves nothing of {float(SPARE):g} for "
                f"{', '.join(free)}; give them a share of `memory` too, or another device"
            )
        for name in free:
            part = (SPARE - given) / len(free)
            open_to[name] = min(open_to.get(name, part), part)
    return {name: float(share) for name, share in {**out, **open_to}.items()}


def _exact(share: float | None) -> Fraction:
    """0.1 + 0.2 + 0.7 is 1."""
    return Fraction(str(share))
