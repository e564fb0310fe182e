"""Fixed places in one piece of memory for models that do not all fit into it. Pure arithmetic, no torch.

A model always returns to the same addresses. Captured CUDA graphs need this: they hold addresses, and elsewhere they
would have to be captured again (seconds). Also, memory never fragments, however often models swap. Models whose regions
overlap are never loaded at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

ALIGNED = 512
"""Every region begins and ends at a multiple of this many bytes."""


@dataclass(frozen=True)
class Region:
    """Bytes `start` to `stop`: one model's weights, followed by its keys and values."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    def overlaps(self, other: Region) -> bool:
        """Whether the two overlap, so that their models can never be loaded at the same time."""
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class MemoryLayout:
    """The regions of several models in `size` bytes."""

    size: int
    regions: tuple[Region, ...]

    @cached_property
    def conflicts(self) -> tuple[tuple[str, str], ...]:
        """Pairs of models that are never loaded at the same time."""
        return tuple((a.name, b.name) for a, b in combinations(self.regions, 2) if a.overlaps(b))

    def rivals(self, name: str) -> tuple[str, ...]:
        """Models that are never loaded at the same time as this one."""
        return tuple(b if a == name else a for a, b in self.conflicts if name in (a, b))


def round_up(size: int) -> int:
    """The size rounded up to a multiple of the alignment."""
    return -(-size // ALIGNED) * ALIGNED


def lay_out(sizes: Mapping[str, int], room: int) -> MemoryLayout | None:
    """Regions for models of these sizes in at most `room` bytes; None: the largest alone is too large.

    First fit, the largest first. A model that finds no free place is laid over the fewest bytes of others, so that
    large models take turns with small ones only if necessary.
    """
    placed: dict[str, Region] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        size = round_up(sizes[name])
        starts = [start for start in (0, *(other.stop for other in placed.values())) if start + size <= room]
        if not starts:
            return None
        regions = [Region(name, start, start + size) for start in sorted(starts)]
        placed[name] = min(regions, key=lambda one: sum(other.size for other in placed.values() if one.overlaps(other)))
    return MemoryLayout(max((r.stop for r in placed.values()), default=0), tuple(placed[name] for name in sizes))
