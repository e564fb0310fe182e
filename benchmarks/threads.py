"""Two processes on the same cores: how much each loses with PyTorch's default threads and with Upshot's settings.

    python benchmarks/threads.py            # about a minute; OMP_NUM_THREADS must not be set

The work is a stack of small layers, like a small model's forward. One run measures both settings alternately; a fair
share of the cores is half the speed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median

from upshot.core.threads import CALM, settle_threads

SECONDS, ROUNDS = 3.0, 3


def work() -> None:
    """Steps a second, printed."""
    if os.environ.get("UPSHOT_THREADS") == "calm":
        settle_threads()
    import torch

    width = 256
    there = [torch.nn.Linear(width, 4 * width) for _ in range(8)]
    back = [torch.nn.Linear(4 * width, width) for _ in range(8)]
    x = torch.randn(64, width)

    def step() -> None:
        y = x
        for one, other in zip(there, back, strict=True):
            y = y + other(torch.nn.functional.silu(one(y)))

    with torch.no_grad():
        for _ in range(5):
            step()
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            step()
            steps += 1
    print(steps / (time.perf_counter() - began))


def speeds(setting: str, processes: int) -> list[float]:
    """Steps per second with this many processes at once."""
    env = {key: value for key, value in os.environ.items() if key not in (*CALM, "OMP_NUM_THREADS")}
    env["UPSHOT_THREADS"] = setting
    command = [sys.executable, __file__, "work"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(processes)]
    return [float(process.communicate()[0]) for process in running]


def main() -> None:
    """Measure both settings in turns and print the table."""
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(ROUNDS):
        for setting in ("torch", "calm"):
            for processes in (1, 2):
                found.setdefault((setting, processes), []).extend(speeds(setting, processes))
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; steps a second, medians")
    for setting, name in (("torch", "as PyTorch does it"), ("calm", "as Upshot does it")):
        alone, beside = median(found[setting, 1]), median(found[setting, 2])
        print(f"{name:<20} alone {alone:8.1f}   each of two {beside:8.1f}   {alone / beside:.1f} times slower")
    ratio = median(found["calm", 2]) / median(found["torch", 2])
    print(f"each of two, Upshot against PyTorch: {ratio:.1f} times as fast")


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
