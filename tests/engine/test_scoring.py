"""Log-probabilities of given ids, compared with transformers' plain forward."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from upshot.core.errors import UserError
from upshot.engine import engine as engine_module
from upshot.engine import sampling
from upshot.engine.engine import Engine, EngineSettings, QueueFull
from upshot.engine.sequence import Rules, Sequence

Make = Callable[..., LlamaForCausalLM]


def plain(model: LlamaForCausalLM, ids: list[int], start: int = 1) -> list[float]:
    """log p of ids[start:] by one forward over all of them."""
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return [float(rows[i - 1, ids[i]]) for i in range(start, len(ids))]


def some_ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(count)]


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_given_ids_have_the_log_probabilities_of_a_plain_forward(
    llama: LlamaForCausalLM, lean: bool, exact: bool
) -> None:
    settings = EngineSettings(page_size=4, chunk_tokens=24, lean=lean, exact=exact)
    engine = Engine(llama, settings=settings)
    asked = [(some_ids(1 + 3 * i, i), some_ids(1 + (5 * i) % 23, 50 + i)) for i in range(9)]
    seqs = [engine.score(prompt, given) for prompt, given in asked]
    engine.run_until_done()
    for seq, (prompt, given) in zip(seqs, asked, strict=True):
        assert seq.finish == "length" and seq.sampled == given and seq.ids == prompt + given
        assert seq.logprobs == pytest.approx(plain(llama, seq.ids, len(prompt)), abs=2e-4)
    assert engine.pool.held == 0 and not engine.scheduler.busy


def test_no_step_computes_more_logits_than_allowed(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "SCORE_LOGITS", 0)
    monkeypatch.setattr(sampling, "NUMBERS", 259 * 5)
    engine = Engine(llama, settings=EngineSettings(page_size=4, chunk_tokens=4096))
    rows: list[int] = []
    logits = engine.runner.driver.logits

    def noting(ids: torch.Tensor, positions: torch.Tensor, step: object, last: torch.Tensor) -> torch.Tensor:
        rows.append(len(last))
        return logits(ids, positions, step, last)

    monkeypatch.setattr(engine.runner.driver, "logits", noting)
    prompt, given = some_ids(300, 1), some_ids(500, 2)
    seqs = [engine.score(prompt, given), engine.score(prompt[:9], given[:30]), engine.score(prompt[:9], given[:31])]
    engine.run_until_done()
    assert max(rows) == 64 and sum(rows) == 500 + 30 + 31
    for seq in seqs:
        assert seq.logprobs == pytest.approx(plain(llama, seq.ids, seq.prompt_len), abs=2e-4)


def test_requests_with_the_same_prompt_read_it_once(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama, settings=EngineSettings(page_size=4))
    prompt = some_ids(81, 3)
    seqs = [engine.score(prompt, some_ids(6, 10 + i)) for i in range(8)]
    [after] = engine.submit(prompt, Rules(max_tokens=3, temperature=0))
    engine.run_until_done()
    assert [s.cached for s in seqs] == [0] + [80] * 7 and after.cached == 80
    for seq in seqs:
        assert seq.logprobs == pytest.approx(plain(llama, seq.ids, seq.prompt_len), abs=2e-4)


def test_scoring_beside_sampling_changes_neither(llama: LlamaForCausalLM) -> None:
    def run(beside: bool) -> tuple[list[int], list[list[float]]]:
        engine = Engine(llama, eos_ids=set(), settings=EngineSettings(page_size=4, chunk_tokens=16, kv_bytes=60 << 10))
        [sampled] = engine.submit(some_ids(20, 1), Rules(max_tokens=30, seed=4))
        scored: list[Sequence] = []
        for i in range(12):
            engine.step()
            if beside:
                scored.append(engine.score(some_ids(5 + i, i), some_ids(9, 30 + i)))
        engine.run_until_done()
        assert engine.pool.held == 0
        for seq in scored:
            assert seq.logprobs == pytest.approx(plain(llama, seq.ids, seq.prompt_len), abs=2e-4)
        return sampled.ids, [s.logprobs for s in scored]

    assert run(True)[0] == run(False)[0]


def test_the_likeliest_ids_are_returned_and_agree_on_the_given_one(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama)
    prompt, given = some_ids(7, 1), some_ids(5, 2)
    every, few, none = (engine.score(prompt, given, top=top) for top in (1000, 2, 0))
    engine.run_until_done()
    for token, logprob, top, two in zip(given, every.logprobs, every.tops, few.tops, strict=True):
        assert dict(top)[token] == logprob and len(top) == 259 and top[:2] == two
    assert none.tops == []


def test_aborting_ends_scoring(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama, settings=EngineSettings(page_size=4, chunk_tokens=8))
    ended: list[str] = []
    waits, reads, stays = (
        engine.score(some_ids(30, i), some_ids(30, 9), on_done=lambda s: ended.append(s.finish)) for i in range(3)
    )
    engine.step()
    engine.abort(waits)
    engine.step()
    engine.abort(reads)
    engine.run_until_done()
    assert ended == ["abort", "abort", "length"] and engine.pool.held == 0
    assert stays.logprobs == pytest.approx(plain(llama, stays.ids, 30), abs=2e-4)


def test_new_weights_score_from_the_first_given_id_again(make_llama: Make) -> None:
    model = make_llama()
    engine = Engine(model, settings=EngineSettings(page_size=4, chunk_tokens=8))
    seq = engine.score(some_ids(5, 1), some_ids(30, 2))
    engine.step()
    engine.step()
    assert seq.logprobs
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    engine.weights_changed()
    engine.run_until_done()
    assert seq.version == 1 and seq.logprobs == pytest.approx(plain(model, seq.ids, 5), abs=2e-4)


def test_requests_that_cannot_be_scored_are_refused_by_name(make_llama: Make) -> None:
    engine = Engine(make_llama(max_position_embeddings=16), settings=EngineSettings(max_waiting=1))
    for prompt, given, word in (
        ([5], [999999], "999999 is outside the vocabulary"),
        ([-5], [3], "-5 is outside the vocabulary"),
        ([2**40], [3], "outside the vocabulary"),
        ([5] * 10, [5] * 7, "exceed the 16 that the model takes"),
        ([], [5], "an empty prompt"),
        ([5], [], "nothing to score"),
    ):
        with pytest.raises(UserError, match=word):
            engine.score(prompt, given)
    longest = engine.score([5] * 10, [6] * 6)
    with pytest.raises(QueueFull):
        engine.score([5], [6])
    engine.run_until_done()
    assert len(longest.logprobs) == 6
