"""Control groups, if available: limits of memory and processes for a slot, v1 or v2.

A slot's zygote is in the slot's group, and its runs start there, so a run costs nothing extra.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from upshot.sandbox.limits import Limits

PREFIX = "upshot-sandbox-"
UNLIMITED = 1 << 60
SLACK_MB, SLACK_PROCESSES = 64, 8
"""Extra memory in a slot's group for the zygote itself, the kernel's own pages and a judge."""


class Cgroups:
    """The supervisor's group, or the reason why there is none."""

    def __init__(self, mount: Path = Path("/sys/fs/cgroup"), disabled: bool = False) -> None:
        self.reason = "disabled" if disabled else ""
        self.homes: dict[str, Path] = {}
        if disabled:
            return
        name = f"{PREFIX}{os.getpid()}-{os.urandom(3).hex()}"
        try:
            self.homes = {controller: home / name for controller, home in _homes(mount).items()}
            for home in set(self.homes.values()):
                for old in list_abandoned(home.parent):
                    _remove(old)
                home.mkdir()
                control = home / "cgroup.subtree_control"
                if control.exists():  # on v2 the controllers must be switched on for the children
                    control.write_text("+memory +pids")
        except OSError as error:
            self.reason = f"{error.strerror or error}: {error.filename or mount}"
            self.close()

    @property
    def active(self) -> bool:
        """Whether slots get a group."""
        return bool(self.homes)

    def slot(self, name: str) -> SlotGroup | None:
        """A group for one zygote."""
        if not self.active:
            return None
        return SlotGroup({controller: home / name for controller, home in self.homes.items()})

    def close(self) -> None:
        """Remove the groups; all their processes must have ended."""
        for home in set(self.homes.values()):
            _remove(home)
        self.homes = {}


class SlotGroup:
    """One zygote's group."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self.paths = paths
        self.bounds = (0, 0)
        self.seen_kills = 0
        for path in set(paths.values()):
            path.mkdir(exist_ok=True)
        self.version2 = (paths["memory"] / "memory.max").exists()
        self._events = paths["memory"] / ("memory.events" if self.version2 else "memory.oom_control")

    def adopt(self, pid: int) -> None:
        """Move a zygote in."""
        for path in set(self.paths.values()):
            (path / "cgroup.procs").write_text(str(pid))

    def limit_to(self, limits: Limits) -> None:
        """Set the limits of the next run (its private disk is memory, too); kills are counted for it from now on."""
        self.seen_kills = self.oom_kills()
        bounds = (limits.memory_mb + limits.disk_mb + SLACK_MB) << 20, limits.processes + SLACK_PROCESSES
        if bounds == self.bounds:
            return
        name = "memory.max" if self.version2 else "memory.limit_in_bytes"
        (self.paths["memory"] / name).write_text(str(bounds[0]))
        (self.paths["pids"] / "pids.max").write_text(str(bounds[1]))
        self.bounds = bounds

    def oom_kills(self) -> int:
        """How many processes the kernel has killed here because memory ran out."""
        count = self._events.read_bytes().partition(b"\noom_kill ")[2].split(maxsplit=1)
        return int(count[0]) if count else 0

    def new_oom_kills(self) -> bool:
        """Whether there were any such kills since the last call."""
        before, self.seen_kills = self.seen_kills, self.oom_kills()
        return self.seen_kills > before

    def remove(self) -> None:
        """Remove the group."""
        for path in set(self.paths.values()):
            _remove(path)


def _homes(mount: Path) -> dict[str, Path]:
    """Where we may make groups, by controller: under our own group, or at the top if ours has no limit."""
    groups: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path.lstrip("/")
    if groups.keys() >= {"memory", "pids"}:
        homes = {}
        for name in ("memory", "pids"):
            limit = mount / name / groups[name] / "memory.limit_in_bytes"
            unlimited = limit.exists() and int(limit.read_text()) > UNLIMITED
            homes[name] = mount / name if unlimited else limit.parent
        return homes
    return dict.fromkeys(("memory", "pids"), _v2_home(mount, mount / groups.get("", "")))


def _v2_home(mount: Path, group: Path) -> Path:
    """Our own group if it may have children with controllers, else the top group if nothing above us has a limit."""
    limits = [path / "memory.max" for path in (group, *group.parents) if mount in path.parents]
    limited = any(limit.exists() and limit.read_text().strip() != "max" for limit in limits)
    homes = [group] if limited or group == mount else [group, mount]
    refusal = OSError("no control group can be made")
    for home in homes:
        control = home / "cgroup.subtree_control"
        try:
            if not {"memory", "pids"} <= set(control.read_text().split()):
                control.write_text("+memory +pids")
            return home
        except OSError as error:
            refusal = error
    raise refusal


def list_abandoned(parent: Path) -> list[Path]:
    """Groups or directories left by killed supervisors: each is named after its process."""
    named = ((path, path.name.removeprefix(PREFIX).split("-")[0]) for path in parent.glob(f"{PREFIX}*"))
    return [path for path, pid in named if pid.isdigit() and not os.path.exists(f"/proc/{pid}")]


def _remove(path: Path) -> None:
    """Remove a group and the groups in it; the kernel may need a moment until it counts as empty."""
    for _ in range(50):
        try:
            for inner in [entry for entry in path.iterdir() if entry.is_dir()] if path.exists() else []:
                with contextlib.suppress(OSError):
                    inner.rmdir()
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)
