"""The engine compared with transformers: same ids, same log-probabilities, whatever runs concurrently."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from upshot.core.errors import UserError
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.sampling import RowRules, sample
from upshot.engine.sequence import Rules

Make = Callable[..., LlamaForCausalLM]


def greedy(model: torch.nn.Module, ids: list[int], n: int) -> list[int]:
    out = model.generate(  # type: ignore[operator]
        torch.tensor([ids]), max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0].tolist()


def batched_greedy(model: torch.nn.Module, prompts: list[list[int]], n: int) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(  # type: ignore[operator]
        ids, attention_mask=mask, max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[:, longest:].tolist()


def plain_logprobs(model: torch.nn.Module, ids: list[int], start: int, temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].float() / temperature
    rows = logits.log_softmax(-1)
    return [float(rows[i - 1, ids[i]]) for i in range(start, len(ids))]


def prompts_of(count: int, low: int = 3, high: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 259) for _ in range(rng.randrange(low, high))] for _ in range(count)]


@pytest.mark.parametrize("lean", [True, False])
def test_greedy_ids_match_transformers(llama: LlamaForCausalLM, lean: bool) -> None:
    engine = Engine(llama, eos_ids=set(), settings=EngineSettings(lean=lean))
    prompts = prompts_of(60)
    seqs = [engine.submit(p, Rules(max_tokens=12, temperature=0))[0] for p in prompts]
    engine.run_until_done()
    assert [s.sampled for s in seqs] == batched_greedy(llama, prompts, 12)
    assert engine.pool.held == 0


def test_greedy_ids_match_transformers_over_1000_prompts(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama, eos_ids=set())
    prompts = prompts_of(1000, high=24, seed=1)
    seqs = [engine.submit(p, Rules(max_tokens=8, temperature=0))[0] for p in prompts]
    engine.run_until_done()
    expected = [row for i in range(0, 1000, 250) for row in batched_greedy(llama, prompts[i : i + 250], 8)]
    assert [s.sampled for s in seqs] == expected


def test_sampled_logprobs_equal_a_plain_forward(llama: LlamaForCausalLM, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(llama, eos_ids=set(), settings=EngineSettings(page_size=4, chunk_tokens=16))
    rules = Rules(max_tokens=20, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=3)
    seqs = [s for p in prompts_of(20) for s in engine.submit(p, rules, n=3)]
    engine.run_until_done()
    gaps = [
        abs(a - b)
        for s in seqs
        for a, b in zip(s.logprobs, plain_logprobs(llama, s.ids, s.prompt_len, 0.7), strict=True)
    ]
    with capsys.disabled():
        print(f"\nfp32 log-probabilities: max {max(gaps):.1e}, mean {sum(gaps) / len(gaps):.1e} off")
    assert max(gaps) < 2e-4


def test_a_request_draws_the_same_ids_alone_and_in_a_crowd(llama: LlamaForCausalLM) -> None:
    rules = Rules(max_tokens=15, seed=11)
    prompt = prompts_of(1)[0]
    alone = Engine(llama, eos_ids=set())
    [first] = alone.submit(prompt, rules)
    alone.run_until_done()
    crowd = Engine(llama, eos_ids=set(), settings=EngineSettings(page_size=2, chunk_tokens=7))
    for other in prompts_of(20, seed=5):
        crowd.submit(other, Rules(max_tokens=9, seed=1))
    [second] = crowd.submit(prompt, rules)
    crowd.run_until_done()
    assert first.ids == second.ids


def test_samples_follow_the_distribution(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama, eos_ids=set())
    prompt = [5, 6, 7]
    seqs = engine.submit(prompt, Rules(max_tokens=1, temperature=2.0), n=4000)
    engine.run_until_done()
    with torch.no_grad():
        probs = (llama(input_ids=torch.tensor([prompt])).logits[0, -1] / 2.0).softmax(-1)
    counts = torch.bincount(torch.tensor([s.ids[-1] for s in seqs]), minlength=len(probs)) / len(seqs)
    assert float((counts - probs).abs().sum()) < 2 * float((probs * (1 - probs) / len(seqs)).sqrt().sum())


def test_24_futures_share_the_pages_of_their_prefix(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama, eos_ids=set(), settings=EngineSettings(page_size=16))
    prefix = [random.Random(1).randrange(3, 259) for _ in range(2048)]
    engine.submit(prefix, Rules(max_tokens=1))
    engine.run_until_done()
    seqs = [engine.submit([*prefix, 3 + i], Rules(max_tokens=40, seed=i))[0] for i in range(24)]
    peak = 0
    while engine.scheduler.busy:
        engine.step()
        peak = max(peak, engine.pool.held)
    own = 24 * -(-41 // 16)
    assert all(len(s.sampled) == 40 for s in seqs)
    assert peak <= 1.2 * 2048 / 16 + own


def test_a_live_fork_shares_pages_and_then_diverges(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama, eos_ids=set(), settings=EngineSettings(page_size=4))
    [seq] = engine.submit(prompts_of(1, 20, 21)[0], Rules(max_tokens=30, temperature=0))
    for _ in range(7):
        engine.step()
    held = engine.pool.held
    twins = [engine.fork(seq, Rules(max_tokens=10, temperature=0)) for _ in range(5)]
    assert engine.pool.held == held
    engine.run_until_done()
    expected = greedy(llama, seq.ids[: seq.prompt_len], 30)
    assert seq.ids == expected
    assert all(t.ids == expected[: len(t.ids)] and len(t.sampled) == 10 for t in twins)


def test_rows_that_share_a_prefix_read_it_once_and_agree_with_transformers(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama, eos_ids=set(), settings=EngineSettings(page_size=4, chunk_tokens=50))
    base, other = prompts_of(2, 30, 31, seed=8)
    prompts = [base + [3 + i] * (1 + i) for i in range(7)] + [[*other, 9 + i] for i in range(5)] + [base, [5, 6]]
    seqs = [engine.submit(p, Rules(max_tokens=10 + i, temperature=0))[0] for i, p in enumerate(prompts)]
    most = 0
    while engine.scheduler.busy:
        engine.step()
        most = max(most, len({id(p) for row in engine.runner.window.rows for p in row.prefixes}))
    assert most == 2
    for i, (prompt, seq) in enumerate(zip(prompts, seqs, strict=True)):
        assert seq.ids == greedy(llama, prompt, 10 + i)


def test_futures_of_replies_of_a_prompt_read_both_once_and_agree_with_transformers(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama, eos_ids=set(), settings=EngineSettings(page_size=4))
    prompt, *replies = prompts_of(4, 36, 37, seed=9)
    prompts = [prompt + reply + [5 + i] * (1 + i) for reply in replies for i in range(3)] + [[7, 8, 9]]
    seqs = [engine.submit(p, Rules(max_tokens=9 + i, temperature=0))[0] for i, p in enumerate(prompts)]
    levels = set()
    while engine.scheduler.busy:
        engine.step()
        levels |= {len(row.prefixes) for row in engine.runner.window.rows}
    assert levels == {0, 2}
    for i, (ids, seq) in enumerate(zip(prompts, seqs, strict=True)):
        assert seq.ids == greedy(llama, ids, 9 + i)


def test_keys_and_values_of_older_weights_are_never_read_again(make_llama: Make) -> None:
    model = make_llama()
    engine = Engine(model, eos_ids=set())
    prompt = prompts_of(1, 60, 61)[0]
    [before] = engine.submit(prompt, Rules(max_tokens=5, temperature=0))
    engine.run_until_done()
    [crossing] = engine.submit(prompt, Rules(max_tokens=40, temperature=0))
    for _ in range(10):
        engine.step()
    kept = len(crossing.ids)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    assert engine.weights_changed() == 1
    assert engine.pool.cached == 0 and engine.pool.held == 0
    [after] = engine.submit(prompt, Rules(max_tokens=20, temperature=0))
    engine.run_until_done()
    assert after.ids == greedy(model, prompt, 20)
    assert (before.version, crossing.version, after.version) == (0, 0, 1)
    assert crossing.ids == greedy(model, crossing.ids[:kept], 40 - (kept - len(prompt)))


def test_whether_rows_fit_into_the_window_does_not_depend_on_earlier_steps(llama: LlamaForCausalLM) -> None:
    cell = 2 * 2 * 2 * 16 * 4  # a key and a value: two layers, two heads of 16 numbers, float32
    windows = []
    for earlier in (0, 64):
        settings = EngineSettings(kv_bytes=16 * 192 * cell)  # 16 rows of 192 ids
        engine = Engine(llama, eos_ids=set(), settings=settings)
        for i in range(earlier):
            engine.submit([3 + i, 4], Rules(max_tokens=3))
        engine.run_until_done()
        for prompt in prompts_of(2, 150, 151, seed=4):
            engine.submit(prompt, Rules(max_tokens=4))
        for _ in range(3):
            engine.step()
        windows.append(len(engine.runner.window.rows))
    assert windows == [2, 2]


def test_logits_that_are_not_numbers_give_some_id_and_leave_other_rows_alone() -> None:
    logits = torch.zeros(3, 50)
    logits[1] = torch.nan
    rules = [Rules(), Rules(), Rules(top_k=3)]
    ids, logprobs, _ = sample(logits, RowRules(rules), np.array([1, 2, 3]))
    assert bool((ids >= 0).all() and (ids < 50).all())
    assert logprobs.isnan().tolist() == [False, True, False]


def test_the_learner_is_left_as_it_was(make_llama: Make) -> None:
    model = make_llama(attention_dropout=0.1)
    model.train()
    engine = Engine(model, eos_ids=set(), settings=EngineSettings(lean=False))
    implementation = model.config._attn_implementation
    [seq] = engine.submit([5, 6, 7], Rules(max_tokens=10, temperature=0))
    engine.run_until_done()
    assert model.training and all(m.training for m in model.modules())
    assert model.config._attn_implementation == implementation
    loss = model(input_ids=torch.tensor([seq.ids]), labels=torch.tensor([seq.ids])).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_full_cache_preempts_and_recomputes(llama: LlamaForCausalLM) -> None:
    page = 2 * 2 * 2 * 16 * 4 * 4
    engine = Engine(llama, eos_ids=set(), settings=EngineSettings(page_size=4, kv_bytes=40 * page))
    prompts = prompts_of(12, 10, 30, seed=2)
    seqs = [engine.submit(p, Rules(max_tokens=30, temperature=0))[0] for p in prompts]
    engine.run_until_done()
    assert engine.scheduler.preempted > 0
    assert [s.sampled for s in seqs] == batched_greedy(llama, prompts, 30)
    assert engine.pool.held == 0


def test_requests_that_can_never_fit_are_refused_with_the_way_out(llama: LlamaForCausalLM) -> None:
    page = 2 * 2 * 2 * 16 * 16 * 4
    engine = Engine(llama, eos_ids=set(), settings=EngineSettings(kv_bytes=10 * page))
    with pytest.raises(UserError, match="kv_bytes"):
        engine.submit([3] * 100, Rules(max_tokens=100))


@pytest.mark.parametrize(
    "rules", [{"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 1.5}, {"min_p": float("nan")}, {"top_k": -1}]
)
def test_cuts_that_would_leave_no_id_are_refused(llama: LlamaForCausalLM, rules: dict[str, Any]) -> None:
    engine = Engine(llama, eos_ids=set(), settings=EngineSettings())
    with pytest.raises(UserError, match="top_p must be above 0 and at most 1, min_p from 0 to 1, top_k at least 0"):
        engine.submit([3], Rules(max_tokens=1, **rules))
