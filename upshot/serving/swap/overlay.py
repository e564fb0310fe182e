"""Fixed places in one piece of memory for models that do not all fit into it. Pure arithmetic, no torch.

A model always comes back to the same addresses, so its captured steps stay valid and nothing is ever fragmented. Models
whose places overlap are never there together; the places are laid so that little overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

ALIGNED = 512
"""Every place begins and ends at a multiple of so many bytes."""


@dataclass(frozen=True)
class Region:
    """Bytes `start` to `stop`: one model's weights, and behind them its keys and values."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    def overlaps(self, other: Region) -> bool:
        """Whether the two can never be there together."""
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class MemoryLayout:
    """The places of several models in `size` bytes."""

    size: int
    places: tuple[Region, ...]

    @cached_property
    def conflicts(self) -> tuple[tuple[str, str], ...]:
        """Pairs of models that are never there together."""
        return tuple((a.name, b.name) for a, b in combinations(self.places, 2) if a.overlaps(b))

    def rivals(self, name: str) -> tuple[str, ...]:
        """Models that are never there together with this one."""
        return tuple(b if a == name else a for a, b in self.conflicts if name in (a, b))

    @property
    def contended(self) -> float:
        """How much of the models' bytes lies in places that have rivals, 0 to 1."""
        total = sum(place.size for place in self.places)
        return sum(place.size for place in self.places if self.rivals(place.name)) / total if total else 0.0


def aligned(size: int) -> int:
    """The size rounded up."""
    return -(-size // ALIGNED) * ALIGNED


def laid(sizes: Mapping[str, int], room: int) -> MemoryLayout | None:
    """Places for models of these sizes in at most `room` bytes; None: the largest alone is too large.

    The largest first, each where it overlaps the fewest bytes of others' places: what is large takes turns with what is
    small only where it must.
    """
    placed: list[Region] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        size = aligned(sizes[name])
        starts = [start for start in (0, *(place.stop for place in placed)) if start + size <= room]
        if not starts:
            return None
        found = [Region(name, start, start + size) for start in starts]
        placed.append(min(found, key=lambda place: (_overlapped(place, placed), place.start)))
    order = {name: number for number, name in enumerate(sizes)}
    places = sorted(placed, key=lambda place: order[place.name])
    return MemoryLayout(max((place.stop for place in places), default=0), tuple(places))


def _overlapped(place: Region, others: list[Region]) -> int:
    """Bytes of all places that this one shares some with."""
    return sum(other.size for other in others if place.overlaps(other))
