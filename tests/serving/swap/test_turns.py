"""Places and turns: loaded models never overlap, nobody waits forever, and every swap serves a request."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from upshot.serving.swap import pool as swap
from upshot.serving.swap.layout import ALIGNED, MemoryLayout, Region, lay_out
from upshot.serving.swap.pool import GRACE, TURN, ModelPool

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def sized(units: list[int]) -> dict[str, int]:
    return {f"m{number}": unit * ALIGNED for number, unit in enumerate(units)}


@given(units=SIZES, room=st.integers(0, 240))
def test_places_hold_their_models_and_stay_within_the_room(units: list[int], room: int) -> None:
    sizes = sized(units)
    found = lay_out(sizes, room * ALIGNED)
    if found is None:
        assert max(units) > room
        return
    assert found.size <= room * ALIGNED and [region.name for region in found.regions] == list(sizes)
    assert all(region.size == sizes[region.name] and region.start >= 0 for region in found.regions)
    if sum(units) <= room:
        assert not found.conflicts, "what fits together is together"


def test_two_small_models_are_there_while_a_large_one_is_away() -> None:
    found = lay_out({"small": 3 * ALIGNED, "large": 8 * ALIGNED, "middle": 4 * ALIGNED}, 8 * ALIGNED)
    assert found is not None
    assert set(found.conflicts) == {("small", "large"), ("large", "middle")}
    assert found.rivals("large") == ("small", "middle")


class Fake:
    """An engine that works off its requests, four at once, one unit of each per tick."""

    stream = None

    def __init__(self) -> None:
        self.waiting: deque[list[int]] = deque()
        self.running: list[list[int]] = []
        self.done = 0
        self.scheduler: Any = self

    @property
    def under_way(self) -> int:
        return len(self.running)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

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
"""(tick, model, amount) of every request."""


def pool_of(layout: MemoryLayout) -> tuple[ModelPool, dict[str, Fake]]:
    """A pool of engines that only count."""
    pool = ModelPool(layout, "cpu", piece=2 * ALIGNED)
    engines = {}
    for name, slot in pool.slots.items():
        size = slot.region.size
        slot.engine = engines[name] = Fake()  # type: ignore[assignment]
        slot.weights = SimpleNamespace(flat=torch.zeros(size, dtype=torch.uint8), size=size)  # type: ignore[assignment]
    return pool, engines


def tick(pool: ModelPool) -> None:
    """One turn of the event loop: the pool checks, and every loaded engine makes a step."""
    pool.tick()
    for slot in pool.slots.values():
        engine: Any = slot.engine
        if slot.here and engine.busy:
            slot.used = pool.ticks
            engine.work(slot.holds)


@settings(max_examples=60, deadline=None)
@given(
    units=st.lists(st.integers(1, 8), min_size=2, max_size=6),
    slack=st.integers(0, 8),
    asked=st.lists(REQUEST, min_size=1, max_size=40),
)
def test_every_request_is_served_in_time_and_swaps_are_no_more_than_requests(
    units: list[int], slack: int, asked: list[tuple[int, int, int]]
) -> None:
    layout = lay_out(sized(units), (max(units) + slack) * ALIGNED)
    assert layout is not None
    pool, engines = pool_of(layout)
    coming: dict[int, list[tuple[str, int]]] = {}
    for who, number, amount in asked:
        coming.setdefault(number, []).append((f"m{who % len(units)}", amount))
    with patch.multiple(swap, GRACE=3, TURN=12):
        # All that one engine is asked may come before another's; each swap costs a turn, running requests, and a load.
        bound = 120 + len(units) * sum(amount + 12 + 30 + 3 + 8 for _, _, amount in asked)
        for number in range(bound):
            for name, amount in coming.pop(number, []):
                engines[name].waiting.append([amount])
            tick(pool)
            if not coming and sum(engine.done for engine in engines.values()) == len(asked):
                break
    assert sum(engine.done for engine in engines.values()) == len(asked), "somebody waited too long"
    handed_over = sum(amount for _, _, amount in asked) // 12
    assert pool.swaps <= len(asked) + handed_over, "nobody is brought in for nothing"


ONE_PLACE = MemoryLayout(2 * ALIGNED, (Region("a", 0, ALIGNED), Region("b", 0, 2 * ALIGNED)))


def ticks_until(pool: ModelPool, name: str, most: int = 4 * TURN) -> int:
    """Ticks until a model is loaded."""
    return next(number for number in range(most) if pool.slots[name].here or tick(pool))


def test_a_free_place_is_used_at_once() -> None:
    pool, engines = pool_of(MemoryLayout(3 * ALIGNED, (Region("a", 0, ALIGNED), Region("b", ALIGNED, 3 * ALIGNED))))
    engines["a"].waiting.append([9999])
    pool.slots["a"].enter()
    engines["b"].waiting.append([1])
    assert ticks_until(pool, "b") <= 2 and pool.slots["a"].here and engines["a"].running


def test_a_model_without_work_leaves_after_a_while_but_not_at_once() -> None:
    pool, engines = pool_of(ONE_PLACE)
    pool.slots["a"].enter()
    engines["a"].waiting.append([40])
    engines["b"].waiting.append([1])
    took = ticks_until(pool, "b")
    assert 40 + GRACE <= took <= 40 + GRACE + 4 and engines["a"].done == 1


def test_a_model_with_work_keeps_its_turn_and_then_only_finishes_running_requests() -> None:
    pool, engines = pool_of(ONE_PLACE)
    pool.slots["a"].enter()
    engines["a"].waiting.extend([[TURN + 50] for _ in range(8)])
    engines["b"].waiting.append([1])
    took = ticks_until(pool, "b")
    assert TURN + 50 <= took <= TURN + 54, "what had begun was let end"
    assert engines["a"].done == 4 and len(engines["a"].waiting) == 4 and not engines["a"].running
    assert ticks_until(pool, "a") <= GRACE + 4, "and the other had only one request"


def test_the_model_that_has_waited_longest_comes_first() -> None:
    regions = (Region("there", 0, ALIGNED), Region("first", 0, 2 * ALIGNED), Region("many", 0, 2 * ALIGNED))
    pool, engines = pool_of(MemoryLayout(2 * ALIGNED, regions))
    pool.slots["there"].enter()
    engines["first"].waiting.append([1])
    tick(pool)
    engines["many"].waiting.extend([[1] for _ in range(50)])
    ticks_until(pool, "first")
    assert not engines["many"].done


def test_memory_reserved_for_a_waiting_model_is_used_by_no_other() -> None:
    regions = (Region("large", 0, 2 * ALIGNED), Region("there", ALIGNED, 2 * ALIGNED), Region("small", 0, ALIGNED))
    pool, engines = pool_of(MemoryLayout(2 * ALIGNED, regions))
    pool.slots["there"].enter()
    engines["there"].waiting.append([2 * TURN])
    engines["large"].waiting.append([1])
    for _ in range(TURN + 2):
        tick(pool)
    engines["small"].waiting.extend([[1] for _ in range(50)])
    ticks_until(pool, "large")
    assert not engines["small"].done


def test_a_model_that_is_loading_is_not_evicted() -> None:
    pool, engines = pool_of(ONE_PLACE)
    pool.piece = 1
    engines["a"].waiting.append([1])
    tick(pool)
    engines["b"].waiting.extend([[1] for _ in range(50)])
    for _ in range(ALIGNED):
        tick(pool)
    assert engines["a"].done == 1
