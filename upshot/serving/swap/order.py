"""Who leaves and who comes: pure decisions, counted in ticks of the event loop (one step of every engine at work).

Ticks and not seconds, so that on the CPU a run hangs on its seed alone. With nothing else at work they pass at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upshot.serving.swap.overlay import Region

PATIENCE = 32
"""Ticks that requests gather, and that a model has had nothing to do, before it leaves for them."""
QUANTUM = 256
"""Ticks that a model goes on working while others wait for its place …"""
DRAIN = 128
"""… and that what it has begun may take to end; then that is put back into its queue and goes on later."""


@dataclass(frozen=True)
class PoolMember:
    """A model as it stands."""

    place: Region
    waiting: int = 0
    """Requests that have not begun."""
    running: int = 0
    """Requests that have."""
    here: bool = False
    """In memory, or on its way."""
    settled: bool = True
    """Not on its way."""
    age: int = 0
    """Ticks that its requests wait for it to come."""
    stay: int = 0
    """Ticks that somebody waits for its place."""
    idle: int = 0
    """Ticks that it has had nothing to do."""

    @property
    def name(self) -> str:
        """Of the model."""
        return self.place.name

    @property
    def wanted(self) -> bool:
        """Whether requests wait for it to come."""
        return self.waiting > 0 and not self.here

    @property
    def overdue(self) -> bool:
        """Whether it has waited so long that nobody may take what it waits for."""
        return self.age >= QUANTUM


@dataclass(frozen=True)
class Decision:
    """What to do now."""

    leave: tuple[str, ...] = ()
    come: tuple[str, ...] = ()
    hold: frozenset[str] = frozenset()
    """Those that begin nothing new, since they are to leave."""


def decide(members: Sequence[PoolMember]) -> Decision:
    """Who leaves, who comes, who ends what it has begun.

    A place that is free is taken at once. Else those in it leave: one without work after a while, one with work after
    its quantum. First come those that have waited too long, then those with most requests.
    """
    here = {m.name: m for m in members if m.here}
    leave: list[str] = []
    come: list[PoolMember] = []
    hold: set[str] = set()
    reserved: list[Region] = []
    for newcomer in sorted((m for m in members if m.wanted), key=_urgency):
        place = newcomer.place
        if any(place.overlaps(other) for other in reserved):
            continue
        rivals = [m for m in here.values() if m.place.overlaps(place)]
        if all(may_leave(rival, newcomer) for rival in rivals):
            leave += [rival.name for rival in rivals]
            for rival in rivals:
                del here[rival.name]
            come.append(newcomer)
            reserved.append(place)
        else:
            ending = [rival for rival in rivals if must_end(rival)]
            hold.update(rival.name for rival in ending)
            if ending or newcomer.overdue:
                reserved.append(place)
    return Decision(tuple(leave), tuple(m.name for m in come), frozenset(hold - set(leave)))


def _urgency(member: PoolMember) -> tuple[bool, int, int]:
    return not member.overdue, -member.age if member.overdue else 0, -member.waiting


def must_end(member: PoolMember) -> bool:
    """Whether its quantum is over: it begins nothing new."""
    return member.settled and member.stay >= QUANTUM


def may_leave(member: PoolMember, newcomer: PoolMember) -> bool:
    """Whether it can go now for the newcomer to come."""
    if not member.settled:
        return False
    if not member.running and not member.waiting:
        return newcomer.overdue or (newcomer.age >= PATIENCE and member.idle >= PATIENCE)
    if member.stay < QUANTUM:
        return False
    return not member.running or member.stay >= QUANTUM + DRAIN
