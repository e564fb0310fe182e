"""Places and turns: nothing overlaps that is there, nobody waits for ever, and a swap is for somebody's request."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from upshot.serving.swap import order
from upshot.serving.swap.order import PoolMember, decide
from upshot.serving.swap.overlay import ALIGNED, Region, laid
from upshot.serving.swap.pool import ModelPool

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def sized(units: list[int]) -> dict[str, int]:
    return {f"m{number}": unit * ALIGNED for number, unit in enumerate(units)}


@given(units=SIZES, room=st.integers(0, 240))
def test_places_hold_their_models_and_stay_within_the_room(units: list[int], room: int) -> None:
    sizes = sized(units)
    found = laid(sizes, room * ALIGNED)
    if found is None:
        assert max(units) > room
        return
    assert found.size <= room * ALIGNED and [place.name for place in found.places] == list(sizes)
    assert all(place.size == sizes[place.name] and place.start >= 0 for place in found.places)
    if sum(units) <= room:
        assert not found.conflicts, "what fits together is together"


def test_two_small_models_are_there_while_a_large_one_is_away() -> None:
    found = laid({"small": 3 * ALIGNED, "large": 8 * ALIGNED, "middle": 4 * ALIGNED}, 8 * ALIGNED)
    assert found is not None
    assert set(found.conflicts) == {("small", "large"), ("large", "middle")}
    assert found.rivals("large") == ("small", "middle")


class Fake:
    """An engine that works off what it is asked, four requests at once, one unit of each a tick."""

    stream = None

    def __init__(self) -> None:
        self.waiting: deque[list[int]] = deque()
        self.running: list[list[int]] = []
        self.done = 0
        self.scheduler: Any = self

    @property
    def under_way(self) -> int:
        return len(self.running)

    def park(self, keep_steps: bool) -> None:
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()

    def resume(self) -> None:
        pass

    def work(self, holds: bool) -> None:
        while self.waiting and len(self.running) < 4 and not holds:
            self.running.append(self.waiting.popleft())
        for request in self.running:
            request[0] -= 1
        self.done += sum(request[0] <= 0 for request in self.running)
        self.running = [request for request in self.running if request[0] > 0]


REQUEST = st.tuples(st.integers(0, 5), st.integers(0, 120), st.integers(1, 30))
"""Who is asked, in which tick, for how much."""


@settings(max_examples=60, deadline=None)
@given(
    units=st.lists(st.integers(1, 8), min_size=2, max_size=6),
    slack=st.integers(0, 8),
    asked=st.lists(REQUEST, min_size=1, max_size=40),
)
def test_every_request_is_served_in_time_and_swaps_are_no_more_than_requests(
    units: list[int], slack: int, asked: list[tuple[int, int, int]]
) -> None:
    sizes = sized(units)
    overlay = laid(sizes, (max(units) + slack) * ALIGNED)
    assert overlay is not None
    pool = ModelPool(overlay, "cpu", piece=2 * ALIGNED)
    engines = {}
    for name, seat in pool.seats.items():
        seat.engine = engines[name] = Fake()  # type: ignore[assignment]
        seat.weights = SimpleNamespace(flat=torch.zeros(sizes[name], dtype=torch.uint8), size=sizes[name])  # type: ignore[assignment]
    coming: dict[int, list[tuple[str, int]]] = {}
    for who, tick, amount in asked:
        coming.setdefault(tick, []).append((f"m{who % len(units)}", amount))
    with patch.multiple(order, PATIENCE=3, QUANTUM=12, DRAIN=6):
        # All that one is asked may come before another's; each hand-over costs a quantum, a drain and a load.
        bound = 120 + len(units) * sum(amount + 12 + 6 + 3 + 8 for _, _, amount in asked)
        for tick in range(bound):
            for name, amount in coming.pop(tick, []):
                engines[name].waiting.append([amount])
            pool.tick()
            for name, seat in pool.seats.items():
                if seat.here:
                    engines[name].work(seat.holds)
            if not coming and sum(engine.done for engine in engines.values()) == len(asked):
                break
    assert sum(engine.done for engine in engines.values()) == len(asked), "somebody waited too long"
    handed_over = sum(amount for _, _, amount in asked) // 12
    assert pool.swaps <= len(asked) + handed_over, "nobody is brought in for nothing"


def member(name: str, start: int, stop: int, **more: Any) -> PoolMember:
    return PoolMember(Region(name, start, stop), **more)


def test_a_free_place_is_taken_at_once() -> None:
    found = decide([member("a", 0, 4, here=True, running=9), member("b", 4, 8, waiting=1)])
    assert (found.come, found.leave) == (("b",), ())


def test_a_model_without_work_leaves_when_requests_have_gathered() -> None:
    def at(age: int, idle: int) -> tuple[str, ...]:
        return decide([member("a", 0, 4, here=True, idle=idle), member("b", 0, 8, waiting=1, age=age)]).leave

    assert at(order.PATIENCE, order.PATIENCE) == ("a",)
    assert at(order.PATIENCE - 1, order.PATIENCE) == () == at(order.PATIENCE, order.PATIENCE - 1)


def test_a_model_with_work_stays_for_its_quantum_then_ends_what_it_has_begun() -> None:
    def at(stay: int, running: int) -> Any:
        rival = member("a", 0, 4, here=True, running=running, waiting=9, stay=stay)
        return decide([rival, member("b", 0, 8, waiting=99, age=order.PATIENCE)])

    assert at(order.QUANTUM - 1, 3) == order.Decision()
    assert at(order.QUANTUM, 3).hold == {"a"} and not at(order.QUANTUM, 3).leave
    assert at(order.QUANTUM, 0).leave == ("a",)
    assert at(order.QUANTUM + order.DRAIN, 3).leave == ("a",)


def test_most_requests_come_first_unless_another_has_waited_too_long() -> None:
    few = member("few", 0, 8, waiting=1, age=order.QUANTUM - 1)
    many = member("many", 0, 8, waiting=50)
    assert decide([few, many]).come == ("many",)
    assert decide([member("few", 0, 8, waiting=1, age=order.QUANTUM), many]).come == ("few",)


def test_what_an_overdue_model_waits_for_is_taken_by_nobody_else() -> None:
    large = member("large", 0, 8, waiting=1, age=order.QUANTUM)
    there = member("there", 4, 8, here=True, running=2)
    small = member("small", 0, 4, waiting=50)
    assert decide([large, there, small]).come == ()


def test_a_model_on_its_way_is_not_sent_back() -> None:
    loading = member("a", 0, 4, here=True, settled=False, waiting=1)
    assert decide([loading, member("b", 0, 8, waiting=50, age=10 * order.QUANTUM)]).leave == ()
