"""The page pool: nothing leaks, and nothing is shared by mistake."""

from __future__ import annotations

import random
import sys
from collections import Counter
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upshot.engine import pages as pool_module
from upshot.engine.pages import ROOT, PagePool, packed_ids
from upshot.engine.scheduler import Scheduler
from upshot.engine.sequence import DONE, Rules, Sequence


def test_a_published_prefix_is_found_by_its_exact_ids() -> None:
    pool = PagePool(8, 2)
    a, b = pool.take(), pool.take()
    chain = pool.publish(ROOT, [1, 2], [a])
    pool.publish(chain, [3, 4], [b])
    assert pool.match([1, 2, 3, 4, 5], 4)[0] == [a, b]
    assert pool.match([1, 2, 9, 4], 4)[0] == [a]
    assert pool.match([3, 4], 2)[0] == [], "a page is not found without what came before it"


def test_idle_prefixes_are_evicted_oldest_end_first() -> None:
    pool = PagePool(4, 1)
    pages = [pool.take() for _ in range(3)]
    chain = ROOT
    for token, page in enumerate(pages):
        chain = pool.publish(chain, [token], [page])
    pool.drop_all(pages)
    assert pool.available == 3 and pool.held == 0
    pool.take()
    assert pool.match([0, 1, 2], 3)[0] == pages[:2]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "find", "drop", "give back", "settle"]), st.integers(0, 9))))
def test_pages_behave_like_a_simple_reference_model(ops: list[tuple[str, int]]) -> None:
    pool = PagePool(9, 2)
    refs: Counter[int] = Counter()
    idle: list[int] = []
    held: list[int] = []
    ids_of: dict[int, list[int]] = {}
    for number, (op, which) in enumerate(ops):
        if op == "take" and pool.available:
            spare = 8 - len(refs) - len(idle)
            page = pool.take()
            assert refs[page] == 0 and (spare or page == idle[0])
            if not spare:
                idle.pop(0)
            refs[page] = 1
            held.append(page)
            ids_of[page] = [number, which]
            pool.publish(ROOT, ids_of[page], [page])
        elif op == "find" and ids_of:
            page = sorted(ids_of)[which % len(ids_of)]
            if page in idle or refs[page]:
                assert pool.match(ids_of[page], 2)[0] == [page]
                held.append(page)
                refs[page] += 1
                idle = [p for p in idle if p != page]
        elif op in ("drop", "give back") and held:
            page = held.pop(which % len(held))
            if op == "drop":
                pool.drop(page)
            else:
                pool.give_back([page])
            refs[page] -= 1
            if not refs[page]:
                del refs[page]
                idle.append(page)
        elif op == "settle":
            pool.settle()
        refs = +refs
        assert pool.available == 8 - len(refs) and pool.held == len(refs)
        assert all(pool.refs(page) == count for page, count in refs.items())
        assert len(pool._idle) <= 2 * pool.n_pages


def test_given_back_pages_count_as_available_and_serve_when_pages_are_short() -> None:
    pool = PagePool(4, 2)
    pages = [pool.take() for _ in range(3)]
    assert not pool.has(1)
    pool.give_back(pages[1:])
    assert pool.alone(pages[0]) and pool.has(2) and not pool.has(3)
    pool.give_back([pool.take(), pool.take()])
    assert pool.take() in pages[1:] and pool.held == 2
    with pytest.raises(RuntimeError, match="dropped more often than held"):
        pool.drop_all([pages[1], pages[1], pages[2], pages[2]])


def test_after_forget_nothing_is_found() -> None:
    pool = PagePool(4, 1)
    page = pool.take()
    pool.publish(ROOT, [5], [page])
    pool.drop(page)
    pool.forget()
    assert pool.match([5], 1)[0] == [] and pool.available == 3


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 20), st.sampled_from([60, 400]))
def test_a_trail_finds_the_same_pages_as_a_page_by_page_search(seed: int, n_pages: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(n_pages, 2)
    pages_module = vars(sys.modules[PagePool.__module__])
    before, pages_module["STRIDE"] = pages_module["STRIDE"], 3
    talks: list[list[int]] = [[]]
    try:
        for _ in range(60):
            ids = [*rng.choice(talks), *(rng.randrange(3) for _ in range(rng.randrange(1, 30)))]
            ids = ids[rng.choice([0, 0, 0, 2]) :][:80]
            expected, chain = [], ROOT
            for start in range(0, len(ids) - 1, 2):
                hit = pool._found.get((chain, packed_ids(ids[start : start + 2]).tobytes()))
                if hit is None:
                    break
                page, chain = hit
                expected.append(page)
            found, after = pool.match(ids, len(ids))
            assert (found, after) == (expected, chain)
            more = len(ids) // 2 - len(found)
            if pool.has(more):
                fresh = pool.take_some(more)
                pool.publish(after, ids[len(found) * 2 : len(ids) // 2 * 2], fresh)
                found += fresh
                pool.remember(ids, found)
                talks.append(ids)
            pool.drop_all(found)
            assert pool.held == 0 and pool.available == n_pages - 1
            if rng.random() < 0.02:
                pool.forget()
    finally:
        pages_module["STRIDE"] = before


def test_a_request_that_waits_for_pages_counts_what_it_finds_in_the_cache_once() -> None:
    pool = PagePool(6, 4)
    scheduler = Scheduler(pool, 4, 64)
    scheduler.add(Sequence(list(range(12)), Rules(max_tokens=6)))
    waited = 0
    for step in range(20):
        plan = scheduler.plan()
        if plan is None:
            break
        scheduler.commit(plan.rows, [99] * len(plan.rows), [0.0] * len(plan.rows), 0)
        if step == 0:
            second = Sequence([*range(8), *[50] * 6], Rules(max_tokens=1))
            scheduler.add(second)
        waited += second in scheduler.waiting
    assert second.finish == "length" and waited > 2
    assert (pool.lookups, pool.hits) == (11 + 13, 8)


def test_siblings_without_a_slot_wait_in_their_order() -> None:
    scheduler = Scheduler(PagePool(20, 4), 2, 64)
    group = [Sequence([1, 2, 3], Rules(max_tokens=2, seed=i)) for i in range(5)]
    siblings = dict.fromkeys(group[1:])
    for seq in group:
        seq.siblings = siblings
    scheduler.add(group[0])
    plan = scheduler.plan()
    assert plan is not None and plan.rows == group[:2]
    assert list(scheduler.waiting) == group[2:]


class Fake:
    """A model of the engine: the 'key' of a position is the tuple of ids up to it, checked at every read.

    `late`: results are committed after the next step has been planned, as on a GPU.
    """

    def __init__(self, n_pages: int, page_size: int, slots: int, chunk: int, late: bool) -> None:
        self.late = late
        self.flights: list[list[Sequence]] = []
        self.coming: dict[Sequence, list[int]] = {}
        """Ids that are sampled but not committed."""
        self.pool = PagePool(n_pages, page_size)
        self.scheduler = Scheduler(self.pool, slots, chunk)
        self.cells: dict[tuple[int, int], tuple[int, ...]] = {}

    def write(self, seq: Sequence, position: int) -> None:
        size = self.pool.page_size
        page = seq.pages[position // size]
        self.cells[page, position % size] = tuple(self.ids(seq)[: position + 1])

    def check(self, seq: Sequence, upto: int) -> None:
        size = self.pool.page_size
        ids = self.ids(seq)
        for position in range(upto):
            assert self.cells[seq.pages[position // size], position % size] == tuple(ids[: position + 1])

    def ids(self, seq: Sequence) -> list[int]:
        return seq.ids + self.coming.get(seq, [])

    def commit(self, left: int) -> None:
        """Hand over results until only `left` steps are in flight."""
        while len(self.flights) > left:
            rows = self.flights.pop(0)
            self.scheduler.commit(rows, [self.coming[seq].pop(0) for seq in rows], [0.0] * len(rows), 0)

    def step(self) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            assert self.flights, "busy, yet nothing to compute"
            self.commit(0)
            return
        for source, target in plan.copies:
            for i in range(self.pool.page_size):
                if (source, i) in self.cells:
                    self.cells[target, i] = self.cells[source, i]
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.stop):
                self.write(chunk.seq, position)
        for chunk in plan.chunks:
            for seq in [chunk.seq, *chunk.samplers]:
                self.check(seq, chunk.stop)
        if not plan.chunks:
            for seq in plan.rows:
                self.write(seq, len(self.ids(seq)) - 1)
            for seq in plan.rows:
                self.check(seq, len(self.ids(seq)))
        for seq in plan.rows:
            self.coming.setdefault(seq, []).append((sum(self.ids(seq)) * 7 + seq.rules.seed) % 3)
        self.flights.append(plan.rows)
        self.commit(1 if self.late else 0)


@pytest.mark.parametrize("stride", [1, 2, pool_module.STRIDE])
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_mix_of_requests_forks_aborts_and_restarts_reads_only_its_own_ids(stride: int, data: st.DataObject) -> None:
    """Siblings often sample the same ids, and conversations continue: their pages are found by a trail."""
    with patch.object(pool_module, "STRIDE", stride):
        mix(data)


def mix(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 4]))
    fake = Fake(
        data.draw(st.integers(24 // size + 2, 60)),
        size,
        data.draw(st.integers(1, 6)),
        data.draw(st.integers(1, 20)),
        data.draw(st.booleans()),
    )
    everything: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "again", *["step"] * 4, "run", "abort", "fork", "restart"]))
        live = [s for s in everything if s.state != DONE]
        done = [s for s in everything if s.state == DONE]
        if action == "add" or (action == "again" and done):
            ids = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=14))
            if action == "again":
                ids = [*data.draw(st.sampled_from(done)).ids, *ids][:18]
            n, differ = data.draw(st.integers(1, 3)), data.draw(st.booleans())
            limit = data.draw(st.integers(1, 6))
            group = [Sequence(list(ids), Rules(max_tokens=limit, seed=i * differ)) for i in range(n)]
            siblings = dict.fromkeys(group[1:])
            for seq in group:
                seq.siblings = siblings
            everything += group
            fake.scheduler.add(group[0])
        elif action in ("step", "run") and fake.scheduler.busy:
            for _ in range(12 if action == "run" else 1):
                if fake.scheduler.busy:
                    fake.step()
        elif action == "abort" and live:
            fake.scheduler.finish(data.draw(st.sampled_from(live)), "abort")
        elif action == "fork" and live:
            seq = data.draw(st.sampled_from(live))
            fake.commit(0)
            if len(seq.ids) < 18:
                everything.append(fake.scheduler.fork(seq, Rules(max_tokens=3, seed=9)))
        elif action == "restart":
            fake.commit(0)
            fake.scheduler.restart()
            fake.pool.forget()
            fake.cells.clear()
    for _ in range(3000):
        if not fake.scheduler.busy:
            break
        fake.step()
    fake.commit(0)
    assert not fake.scheduler.busy, "it never came to an end"
    assert all(s.state == DONE for s in everything)
    assert fake.pool.held == 0, "pages leaked"
    assert sorted(fake.scheduler._slots) == list(range(fake.scheduler.max_running)), "slots leaked"
