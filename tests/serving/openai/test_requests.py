"""What one request may do to others and to itself: forks, failures, aborts, a constant stream of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from upshot.config.sampling import Sampling
from upshot.core.errors import UserError
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.pages import PagePool
from upshot.engine.sampling import RowRules, keys, sample, uniforms
from upshot.engine.scheduler import Scheduler
from upshot.engine.sequence import DONE, Rules, Sequence
from upshot.models.base import ModelCallError, Request
from upshot.models.engine_model import EngineModel

Make = Callable[..., LlamaForCausalLM]


class Digits:
    """A grammar of the ids 10 to 19; ends after `left` of them."""

    def __init__(self, left: int, allowed: Callable[[], np.ndarray] | None = None) -> None:
        self.left = left
        self._allowed = allowed

    def allowed(self) -> np.ndarray:
        if self._allowed is not None:
            return self._allowed()
        return np.packbits(np.isin(np.arange(288), np.arange(10, 20)), bitorder="little").view(np.uint32)

    def accept(self, token: int) -> bool:
        assert 10 <= token < 20
        self.left -= 1
        return self.left == 0

    def copy(self) -> Digits:
        return Digits(self.left, self._allowed)


def running(engine: Engine, rules: Rules, steps: int, **more: Any) -> Sequence:
    [seq] = engine.submit([5, 6, 7], rules, **more)
    for _ in range(steps):
        engine.step()
    return seq


# --- forks


def test_a_fork_ends_at_the_models_length(make_llama: Make) -> None:
    engine = Engine(make_llama(max_position_embeddings=32), eos_ids=set())
    seq = running(engine, Rules(max_tokens=20), 5)
    twin = engine.fork(seq, Rules(max_tokens=500))
    engine.run_until_done()
    assert len(twin.ids) == 32 and twin.finish == "length"
    full = running(engine, Rules(max_tokens=29), 40)
    with pytest.raises(UserError, match="32"):
        engine.fork(full, Rules(max_tokens=1))


def test_a_fork_that_can_never_fit_is_refused(llama: LlamaForCausalLM) -> None:
    page = 2 * 2 * 2 * 16 * 16 * 4
    engine = Engine(llama, eos_ids=set(), settings=EngineSettings(kv_bytes=10 * page))
    seq = running(engine, Rules(max_tokens=20), 5)
    with pytest.raises(UserError, match="kv_bytes"):
        engine.fork(seq, Rules(max_tokens=200))


def test_forks_with_the_same_settings_differ_from_each_other_and_from_their_origin(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama, eos_ids=set())
    rules = Rules(max_tokens=30, seed=4)
    seq = running(engine, rules, 4)
    twins = [engine.fork(seq, rules) for _ in range(3)]
    twins.append(engine.fork(twins[0], rules))
    start = len(seq.ids)
    engine.run_until_done()
    tails = [tuple(s.ids[start : start + 20]) for s in [seq, *twins]]
    assert len(set(tails)) == 5


def test_the_same_seed_gives_the_same_forks(llama: LlamaForCausalLM) -> None:
    results = []
    for neighbours in (0, 3):
        engine = Engine(llama, eos_ids=set())
        for i in range(neighbours):
            engine.submit([9, 9, i + 3], Rules(max_tokens=9))
        seq = running(engine, Rules(max_tokens=30, seed=4), 0)
        while len(seq.sampled) < 4:
            engine.step()
        twins = [engine.fork(seq, Rules(max_tokens=9, seed=8)) for _ in range(2)]
        engine.run_until_done()
        results.append([s.ids for s in [seq, *twins]])
    assert results[0] == results[1]


def test_a_fork_continues_the_grammar_of_its_origin(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama, eos_ids=set())
    seq = running(engine, Rules(max_tokens=30), 3, grammar=lambda: Digits(8))
    twin = engine.fork(seq, Rules(max_tokens=30))
    already = len(seq.sampled)
    engine.run_until_done()
    assert all(10 <= t < 20 for t in seq.sampled + twin.sampled)
    assert len(seq.sampled) == 8 == already + len(twin.sampled)
    assert seq.finish == twin.finish == "stop" and seq.sampled[already:] != twin.sampled


def test_a_forked_json_grammar_is_independent_of_its_origin(tokenizer: Any) -> None:
    grammars = pytest.importorskip("upshot.models.grammar")
    pytest.importorskip("llguidance")
    first = grammars.SchemaCompiler(tokenizer, 259, {2}).grammar({"enum": ["ab", "ac"]})()
    for token in tokenizer.encode('"a'):
        first.accept(token)
    twin = first.copy()
    b, c = tokenizer.encode("bc")
    first.accept(b)
    assert not np.array_equal(first.allowed(), twin.allowed())
    twin.accept(c)


# --- failures


def fail(*_: object) -> Any:
    raise ValueError("this request's own")


FAILURES: dict[str, dict[str, Any]] = {
    "its callback": {"on_token": fail},
    "its stop": {"rules": Rules(max_tokens=9, stopped=fail)},
    "its grammar's mask": {"grammar": lambda: Digits(5, fail)},
    "its grammar, which allows nothing": {"grammar": lambda: Digits(5, lambda: np.zeros(9, dtype=np.uint32))},
    "its grammar, which refuses the id": {"grammar": lambda: Digits(5, lambda: np.full(9, 1, dtype=np.uint32))},
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failing_request_fails_alone(llama: LlamaForCausalLM, kind: str) -> None:
    alone = Engine(llama, eos_ids=set())
    expected = running(alone, Rules(max_tokens=12, seed=3), 20).ids
    engine = Engine(llama, eos_ids=set())
    [good] = engine.submit([5, 6, 7], Rules(max_tokens=12, seed=3))
    ended: list[Sequence] = []
    options = {"rules": Rules(max_tokens=9), **FAILURES[kind]}
    [bad] = engine.submit([5, 6, 7], options.pop("rules"), on_done=ended.append, **options)
    engine.run_until_done()
    assert good.ids == expected and good.finish == "length"
    assert ended == [bad] and bad.finish == "error" and isinstance(bad.error, Exception)
    assert engine.pool.held == 0


def test_a_failing_on_done_is_reported_and_leaves_the_others_alone(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama, eos_ids=set())
    engine.submit([5, 6, 7], Rules(max_tokens=3), on_done=fail)
    [good] = engine.submit([5, 6, 7], Rules(max_tokens=12))
    with pytest.warns(UserWarning, match="this request's own"):
        engine.run_until_done()
    assert good.finish == "length" and engine.pool.held == 0


def test_a_bystander_of_a_failing_callback_gets_its_completion(llama: LlamaForCausalLM, tokenizer: Any) -> None:
    async def both() -> None:
        model = EngineModel(Engine(llama, eos_ids=set()), tokenizer, "tiny")
        good = asyncio.create_task(model.generate(Request([5, 6], Sampling(max_tokens=60, seed=1))))
        await asyncio.sleep(0.01)
        [bad] = model.submit(Request([5, 6], Sampling(max_tokens=5)), on_token=fail)
        assert (await good)[0].completion_tokens > 0
        with pytest.raises(ModelCallError, match="this request's own"):
            model.completion(bad, Sampling())

    asyncio.run(both())


def test_a_batch_with_one_bad_prompt_leaves_no_request_running(llama: LlamaForCausalLM, tokenizer: Any) -> None:
    async def batch() -> None:
        model = EngineModel(Engine(llama, eos_ids=set()), tokenizer, "tiny")
        prompts = [[5, 6], [7, 8], [100_000]]
        with pytest.raises(UserError, match="100000"):
            await model.generate_all([Request(p, Sampling(max_tokens=4000)) for p in prompts])
        for _ in range(3):
            await asyncio.sleep(0)
        assert not model.engine.scheduler.busy and model.engine.pool.held == 0

    asyncio.run(batch())


# --- draws


def test_a_draw_never_rounds_to_one_and_never_leaves_what_the_cuts_keep() -> None:
    # keys whose top 53 bits round to 1 in float32 exist; the hash is inverted to find seeds that give such keys
    position = np.array([6])
    for key in (2**64 - 1, 2**64 - 2**33, 2**64 - 2**39):
        seed = seed_with_key(key, 6)
        assert int(keys(np.array([seed], dtype=np.uint64), position)[0]) == key
        assert uniforms(np.array([seed], dtype=np.uint64), position).astype(np.float32)[0] < 1.0
        logits = torch.full((1, 259), -20.0)
        logits[0, 7], logits[0, 9] = 20.0, 19.7
        for rules, last in ((Rules(top_k=1, seed=seed), 7), (Rules(top_k=2, seed=seed), 9)):
            ids, logprobs, _ = sample(logits, RowRules([rules]), position)
            assert int(ids[0]) == last and float(logprobs[0]) > -1


def seed_with_key(key: int, position: int) -> int:
    """The seed that gives this key at the position: the hash of `sampling.keys`, inverted."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def unshifted(x: int, by: int) -> int:
        y = x
        for _ in range(64 // by):
            y = x ^ (y >> by)
        return y

    def unmixed(x: int) -> int:
        x = unshifted(x, 31) * pow(0x94D049BB133111EB, -1, 2**64) & mask
        x = unshifted(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
        return unshifted(x, 30)

    return (unmixed((unmixed(key) - position * golden) & mask) - golden) & mask


# --- turns and queues


def test_a_stream_gets_an_id_at_every_second_step_while_prompts_keep_coming(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama, eos_ids=set(), settings=EngineSettings(chunk_tokens=16))
    seq = running(engine, Rules(max_tokens=100), 1)
    sampled = [len(seq.sampled)]
    for i in range(20):
        engine.submit([(3 + 7 * i + j) % 250 + 3 for j in range(40)], Rules(max_tokens=50))
        engine.step()
        sampled.append(len(seq.sampled))
    assert all(later > earlier for earlier, later in zip(sampled, sampled[2:], strict=False))
    for other in engine.scheduler.all():
        engine.abort(other)


class Counted(Sequence):
    """Counts comparisons, which is what a search through a queue needs."""

    compared = 0
    __hash__ = Sequence.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return self is other


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def test_aborting_all_waiting_requests_is_linear(together: bool, backwards: bool) -> None:
    scheduler = Scheduler(PagePool(8, 4), 4, 16)
    seqs = [Counted([1, 2, 3], Rules()) for _ in range(500)]
    if together:
        siblings = dict.fromkeys(seqs[1:])
        for seq in seqs:
            seq.siblings = siblings  # type: ignore[assignment]
    for seq in seqs[:1] if together else seqs:
        scheduler.add(seq)
    Counted.compared = 0
    for seq in reversed(seqs) if backwards else seqs:
        scheduler.finish(seq, "abort")
    assert Counted.compared <= 3 * len(seqs)
    assert all(s.state == DONE for s in seqs) and not scheduler.busy and not scheduler.all()


def test_steps_run_on_the_models_own_device(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(llama)
    engine.shape = replace(engine.shape, device=torch.device("cuda:1"))
    current: list[Any] = []

    @contextmanager
    def device(wanted: Any) -> Iterator[None]:
        current.append(wanted)
        yield
        current.pop()

    monkeypatch.setattr("torch.cuda.device", device)
    run, seen = engine.runner.run, []
    monkeypatch.setattr(engine.runner, "run", lambda plan: (seen.extend(current), run(plan))[1])
    engine.submit([5, 6, 7], Rules(max_tokens=1))
    engine.run_until_done()
    assert seen == [torch.device("cuda:1")] and not current
