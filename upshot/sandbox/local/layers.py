"""Which layers of isolation are active, which ones the operator requires, and why one is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError, did_you_mean

UID_MAP = "/proc/self/uid_map"
NAMES = ("namespaces", "landlock", "seccomp", "uid", "cgroup")
PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
QUIET_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # The C library's allocator reserves an arena of 64 MB of address space per thread: seven would fill a run's limit.
    "MALLOC_ARENA_MAX": "1",
    # Arrow's own allocator begins by reserving a GB of it.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}


@dataclass(frozen=True)
class Layers:
    """The isolation of this machine."""

    namespaces: str | None
    """'root', 'user' or None."""
    landlock: int
    seccomp: bool
    uid_base: int | None
    """The first of the user ids to which slots drop; None if this process may not change its user."""
    reasons: dict[str, str]
    """Why a layer is missing."""

    def active(self, cgroup: bool) -> dict[str, bool]:
        """For each layer, whether it is active."""
        return {
            "namespaces": self.namespaces is not None,
            "landlock": self.landlock > 0,
            "seccomp": self.seccomp,
            "uid": self.uid_base is not None or self.namespaces == "user",
            "cgroup": cgroup,
        }

    def describe(self, cgroup: bool) -> dict[str, Any]:
        """For /health and the log: each layer, with the reason if it is missing."""
        active = self.active(cgroup)
        details = {"namespaces": self.namespaces, "landlock": f"abi {self.landlock}"}
        missing = {name: f"missing: {self.reasons.get(name, 'unknown')}" for name, there in active.items() if not there}
        return dict.fromkeys(active, "active") | details | missing


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of `inside` in a clean interpreter."""
    boot = (
        f"import sys; sys.path.insert(0, {PACKAGE_PARENT!r}); from upshot.sandbox.inside.{module} import main; main()"
    )
    return [sys.executable, "-I", "-X", "utf8", "-c", boot, *arguments]


def user_id_base() -> int | None:
    """The first of a thousand user ids that nobody else has; None if this container maps too few."""
    highest = 0
    with open(UID_MAP) as file:
        for line in file:
            inside, _, count = (int(word) for word in line.split())
            highest = max(highest, inside + count - 1)
    if highest > 2_000_000_000:
        return 1_800_000_000 + (os.getpid() % 100_000) * 1_000
    return 60_000 if highest >= 60_999 else None


def probe(disable: Iterable[str] = ()) -> Layers:
    """Find out what the kernel offers; `disable` treats some layers as missing, for tests."""
    base = user_id_base()
    probing = command("probe", json.dumps(base))
    done = subprocess.run(probing, capture_output=True, text=True, env=QUIET_ENVIRONMENT, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"the sandbox probe failed: {done.stderr.strip()[-500:]}")
    obstacles = json.loads(done.stdout)
    for name in disable:
        for key in ("root", "user") if name == "namespaces" else (name,):
            obstacles[key] = "disabled"
    if obstacles["root"] is not None and obstacles["user"] is not None and obstacles["uid"] is None:
        # Without their own root directory, programs of another user need access to Python's files.
        obstacles["uid"] = obstacles["uid_reads"]
    kind = next((kind for kind in ("root", "user") if obstacles[kind] is None), None)
    reasons = {name: str(obstacles[name]) for name in ("landlock", "seccomp", "uid") if obstacles.get(name) is not None}
    if kind is None:
        reasons["namespaces"] = f"{obstacles['root']}; {obstacles['user']}"
    return Layers(
        namespaces=kind,
        landlock=obstacles["landlock_abi"] if obstacles["landlock"] is None else 0,
        seccomp=obstacles["seccomp"] is None,
        uid_base=base if obstacles["uid"] is None else None,
        reasons=reasons,
    )


def demand(layers: Layers, cgroup: bool, required: Iterable[str]) -> None:
    """Refuse a machine without the layers that the operator requires, or with too little isolation."""
    described = layers.describe(cgroup)
    active = layers.active(cgroup)
    for name in required:
        if name not in NAMES:
            raise UserError(f"unknown layer '{name}' in require; {did_you_mean(name, NAMES)}")
        if not active[name]:
            raise UserError(
                f"this machine lacks the required layer '{name}' ({described[name]}); "
                "drop it from --require or run elsewhere"
            )
    if not layers.seccomp or not (layers.namespaces or layers.landlock):
        raise UserError(
            f"this machine isolates too little: seccomp {described['seccomp']}, namespaces {described['namespaces']}, "
            f"landlock {described['landlock']}; the sandbox needs seccomp and one of the other two"
        )
