"""The limits of one run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from upshot.core.errors import UserError


@dataclass(frozen=True)
class Limits:
    """Limits of one run; a run that reaches one gets the corresponding outcome."""

    cpu_seconds: float = 6.0
    """CPU time of the program (its load and all its assert tests together; each stdio test alone)."""
    wall_seconds: float | None = None
    """Limit on real time; None means three times the CPU time plus one second, which is enough on a busy machine."""
    judge_seconds: float | None = None
    """CPU time of the judged look at assert tests, after which nothing more is confirmed; None means `cpu_seconds`.
    0 skips that look, so that every pass is unconfirmed."""
    memory_mb: int = 512
    """Memory of each process of the run; with a cgroup, of all of them together."""
    processes: int = 32
    """Maximum number of processes and threads at the same time."""
    open_files: int = 128
    """Open descriptors of each process; at least 64."""
    file_mb: int = 64
    """Largest size of one file."""
    disk_mb: int = 64
    """Size of the private /tmp."""
    files: int = 4096
    """Files and directories in the private /tmp."""
    output_kb: int = 1024
    """Size of standard output and of standard error; more is cut and flagged."""
    result_kb: int = 1024
    """Total size of the values returned to the tests."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            allowed = {"wall_seconds": (None,), "judge_seconds": (None, 0)}.get(name, ())
            if value in allowed:
                continue
            number = (int, float) if name.endswith("_seconds") else int
            if not isinstance(value, number) or isinstance(value, bool) or not 0 < value < float("inf"):
                kind = "a number" if name.endswith("_seconds") else "a whole number"
                raise UserError(f"limit {name} is {value!r}; it must be {kind} above 0")
        if self.open_files < 64:
            raise UserError(f"limit open_files is {self.open_files}; it must be at least 64")

    @property
    def wall(self) -> float:
        """The wall cap in seconds."""
        return self.wall_seconds if self.wall_seconds is not None else 3 * self.cpu_seconds + 1

    def with_cpu(self, seconds: float | None) -> Limits:
        """The same limits with a different CPU time; None changes nothing."""
        return self if seconds is None else replace(self, cpu_seconds=float(seconds))

    @property
    def judged(self) -> Limits:
        """The limits of a judged look."""
        return self.with_cpu(self.judge_seconds)

    def as_request(self) -> dict[str, Any]:
        """The fields the zygote reads."""
        names = ("cpu_seconds", "memory_mb", "processes", "open_files", "disk_mb", "files")
        fields = {name: getattr(self, name) for name in names}
        # Output and results are files too: the file limit must not cut them first.
        floor = (max(self.output_kb, self.result_kb) >> 10) + 1
        return {**fields, "wall_seconds": self.wall, "file_mb": max(self.file_mb, floor)}
