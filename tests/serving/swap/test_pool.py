"""Models that do not fit together take turns, and generate the same as alone."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from tests.serving.swap.members import KV, NAMES, alone, ask, engine_in, layout, make
from upshot.core.errors import UserError
from upshot.engine.engine import EngineSettings
from upshot.serving.swap.layout import lay_out
from upshot.serving.swap.pool import ModelPool


def test_five_models_that_take_turns_generate_what_each_does_alone() -> None:
    pool = ModelPool(layout(), "cpu", piece=4096)
    assert pool.arena.layout.conflicts
    engines = {name: engine_in(pool, name) for name in NAMES}

    async def play() -> None:
        asked = {name: ask(engine, seed=1) for name, engine in engines.items()}
        for engine in engines.values():
            engine.wake()
        while any(engine.scheduler.busy for engine in engines.values()):
            await asyncio.sleep(0)
        for name, seqs in asked.items():
            assert [seq.ids for seq in seqs] == alone(name, seed=1)
        await pool.aclose()

    asyncio.run(play())
    assert pool.arena.most <= pool.arena.layout.size
    assert len(NAMES) <= pool.swaps <= len(NAMES) + 3, "one swap serves all that wait"


def test_two_hundred_random_swaps_lose_nothing_and_stay_within_the_plan() -> None:
    pool = ModelPool(layout(), "cpu")
    engines = {name: engine_in(pool, name) for name in NAMES}
    rng = random.Random(0)
    said = {name: alone(name, seed=2, count=2) for name in NAMES}
    asked = {name: ask(engine, seed=2, count=2) for name, engine in engines.items()}
    address = pool.arena.memory.data_ptr()
    before = pool.swaps
    while pool.swaps < before + 200:
        name = rng.choice([name for name, slot in pool.slots.items() if not slot.here])
        engine = engines[name]
        if not engine.scheduler.busy:
            assert [seq.ids for seq in asked[name]] == said[name]
            asked[name] = ask(engine, seed=2, count=2)
        for _ in range(rng.randint(1, 3)):  # an engine that is absent brings itself in, and others out
            engine.step()
    for name, engine in engines.items():
        engine.run_until_done()
        assert [seq.ids for seq in asked[name]] == said[name]
    assert pool.arena.most <= pool.arena.layout.size == pool.arena.memory.numel()
    assert pool.arena.memory.data_ptr() == address


def test_requests_that_arrive_while_their_model_is_away_or_loading_are_answered() -> None:
    pool = ModelPool(layout(["m0", "m1"], holds=1), "cpu", piece=256)
    first, second = (engine_in(pool, name) for name in ("m0", "m1"))
    assert second.swap_slot is not None and second.swap_slot.here and first.parked

    async def play() -> None:
        early = ask(first, 1)
        first.wake()
        await asyncio.sleep(0)
        late = []
        while not first.swap_slot.here:  # type: ignore[union-attr]
            if pool.slots["m0"].load is not None and not late:
                late = ask(first, 3)
            await asyncio.sleep(0)
        assert late, "a load takes several turns of the loop"
        while first.scheduler.busy:
            await asyncio.sleep(0)
        assert [seq.ids for seq in early] == alone("m0", 1) and [seq.ids for seq in late] == alone("m0", 3)

    asyncio.run(play())


def test_at_the_end_of_its_turn_a_model_finishes_running_requests_and_starts_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("upshot.serving.swap.pool.TURN", 5)
    pool = ModelPool(layout(["m0", "m1"], holds=1), "cpu")
    busy = engine_in(pool, "m0", lambda **more: EngineSettings(max_running=4, **more))
    other = engine_in(pool, "m1")

    async def play() -> None:
        many = [ask(busy, seed, count=2) for seed in range(12)]
        busy.wake()
        while not busy.generated:
            await asyncio.sleep(0)
        few = ask(other, 1)
        other.wake()
        held = False
        while other.scheduler.busy:
            slot = pool.slots["m0"]
            held |= slot.holds
            await asyncio.sleep(0)
        assert held and busy.scheduler.busy, "the other did not wait for all of it"
        while busy.scheduler.busy:
            await asyncio.sleep(0)
        assert [seq.ids for seq in few] == alone("m1", 1)
        assert [[seq.ids for seq in group] for group in many] == [alone("m0", seed, count=2) for seed in range(12)]
        assert busy.scheduler.preempted == 0, "what had begun was let end"

    asyncio.run(play())


def test_requests_cancelled_while_they_wait_block_nobody() -> None:
    pool = ModelPool(layout(["m0", "m1"], holds=1), "cpu")
    away, there = (engine_in(pool, name) for name in ("m0", "m1"))

    async def play() -> None:
        busy, given_up = ask(there, 1), ask(away, 1)
        there.wake()
        away.wake()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for seq in given_up:
            away.abort(seq)
        for _ in range(3):
            await asyncio.sleep(0)
        assert away._loop_task is not None
        while there.scheduler.busy:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert away._loop_task.done() and away.parked
        again = ask(away, 2)
        away.wake()
        while away.scheduler.busy:
            await asyncio.sleep(0)
        assert [seq.ids for seq in again] == alone("m0", 2) and len(busy)

    asyncio.run(play())


def test_a_failed_load_fails_the_requests_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ModelPool(layout(["m0", "m1"], holds=1), "cpu")
    away, _ = (engine_in(pool, name) for name in ("m0", "m1"))

    def broken(*_: object) -> None:
        raise RuntimeError("no copy")

    monkeypatch.setattr("upshot.serving.swap.memory.HostCopy._copy", broken)

    async def play() -> None:
        asked = ask(away, 1)
        away.wake()
        while away.scheduler.busy:
            await asyncio.sleep(0)
        assert {seq.finish for seq in asked} == {"error"}
        assert away._loop_task is not None
        with pytest.raises(RuntimeError, match="no copy"):
            await away._loop_task
        assert pool._minder is not None and pool._minder.exception() is not None

    asyncio.run(play())


def test_an_idle_pool_holds_no_memory_and_continues_afterwards() -> None:
    pool = ModelPool(layout(), "cpu")
    engines = {name: engine_in(pool, name) for name in NAMES}
    asked = {name: ask(engine, 5) for name, engine in engines.items()}
    for engine in list(engines.values())[:2]:
        engine.step()
        engine.step()
    pool.rest()
    pool.rest()
    assert pool.arena.memory.untyped_storage().nbytes() == 0 and not pool.arena.held
    assert all(engine.parked for engine in engines.values())
    for name, engine in engines.items():
        engine.run_until_done()
        assert [seq.ids for seq in asked[name]] == alone(name, 5)


def test_joined_projections_and_pages_are_only_in_the_arena() -> None:
    pool = ModelPool(layout(["m0", "m1"], holds=1), "cpu")
    engine_in(pool, "m1")
    engine = engine_in(pool, "m0", tie_word_embeddings=True)
    start, stop = pool.arena.memory.data_ptr(), pool.arena.memory.data_ptr() + pool.arena.memory.numel()
    layer = engine.runner.driver.layers[0]
    held = [*engine.model.parameters(), layer.qkv.joined.weight, layer.gate_up.joined.weight, engine.runner.store.k]
    assert all(start <= tensor.data_ptr() < stop for tensor in held)
    assert layer.qkv.joined.weight.data_ptr() == engine.model.model.layers[0].self_attn.q_proj.weight.data_ptr()


def test_a_place_that_is_too_small_for_the_weights_is_refused_with_both_sizes() -> None:
    found = lay_out({"m4": 1 << 15}, 1 << 15)
    assert found is not None
    with pytest.raises(UserError, match=r"'m4' take .* MiB, but the memory plan reserves 0\.0 MiB"):
        ModelPool(found, "cpu").slots["m4"].furnish(make("m4"))


def test_pages_are_zeros_when_an_engine_comes_back() -> None:
    pool = ModelPool(layout(["m0", "m1"], holds=1), "cpu")
    first, second = (engine_in(pool, name) for name in ("m0", "m1"))
    second.swap_slot.leave()  # type: ignore[union-attr]
    pool.arena.memory.fill_(255)  # not numbers, if read as floats
    first.swap_slot.enter()  # type: ignore[union-attr]
    assert not first.runner.store.k.any() and not first.runner.store.v.any()
    asked = ask(first, 1)
    first.run_until_done()
    assert [seq.ids for seq in asked] == alone("m0", 1)
    assert torch.isfinite(torch.tensor([p for seq in asked for p in seq.logprobs])).all()
    assert pool.slots["m0"].kv_bytes >= KV
