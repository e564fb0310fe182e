"""PyTorch's threads on the CPU: no more than this process may use, and none that spins while it waits.

OpenMP's threads spin for about a millisecond before they sleep. That costs nothing if the machine does nothing else. If
two processes share it (a server and a trainer), the one that spins keeps the core from the one it waits for, and both
become many times slower. If threads sleep instead, the system shares the cores fairly. The number of threads does not
follow the load, because it affects how sums are rounded, and the same seed should give the same run.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
CALM = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
"""For GNU's and Intel's OpenMP; variables that are set already are kept."""


def settle_threads() -> None:
    """Set the environment that PyTorch reads when it is imported; does nothing if it is imported already."""
    if "torch" in sys.modules:
        return
    for name, value in CALM.items():
        os.environ.setdefault(name, value)
    allowed = cores()
    if allowed < len(os.sched_getaffinity(0)):  # PyTorch knows the affinity, but not a container's quota
        os.environ.setdefault("OMP_NUM_THREADS", str(allowed))


def cores() -> int:
    """How many cores this process may use: by its affinity, and by the quota of its container."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), quota(CGROUP))))


def thread_count() -> int:
    """The number of PyTorch's threads here, which affects how sums are rounded."""
    stated = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(stated) if stated.isdigit() and int(stated) else cores()


def quota(cgroup: Path) -> float:
    """The number of cores whose time a control group grants; infinite if it sets no limit."""
    try:
        if (cgroup / "cpu.max").is_file():
            granted, period = (cgroup / "cpu.max").read_text().split()
        else:
            files = (cgroup / "cpu" / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
            granted, period = (file.read_text().strip() for file in files)
        return math.inf if granted in ("max", "-1") else int(granted) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
