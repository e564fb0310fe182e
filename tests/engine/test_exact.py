"""Exact mode on the CPU: every log-probability that the engine reports equals the learner's bit for bit, in any batch.

The GPU's kernels are checked by test_exact_kernels.py.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from tests.engine.conftest import tiny_llama
from tests.engine.test_families import FAMILIES, build
from upshot.core.errors import UserError
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.exact import blocks
from upshot.engine.exact.forward import ExactForward
from upshot.engine.exact.mode import ExactMode
from upshot.engine.sequence import Rules, Sequence

Make = Callable[..., LlamaForCausalLM]
MODEL = tiny_llama(vocab_size=97)


def learner_logprobs(
    model: torch.nn.Module, rows: list[list[int]], width: int = 0, temperature: float = 1.0, grad: bool = False
) -> list[list[float]]:
    """What an exact learner computes for one micro-batch, padded to at least `width`."""
    forward = ExactForward(kernels=False)
    longest = max(width, *map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    seen = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    with torch.set_grad_enabled(grad), forward.attention(model):
        with forward.operations():
            logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits
        found = forward.token_logprobs(logits, ids, temperature)
    return [values[: len(row)] for values, row in zip(found.tolist(), rows, strict=True)]


def assert_bitwise(model: torch.nn.Module, seqs: list[Sequence], rng: random.Random) -> None:
    """The engine's log-probabilities equal the learner's, in micro-batches drawn at random."""
    left = list(seqs)
    rng.shuffle(left)
    while left:
        some = [left.pop() for _ in range(min(len(left), rng.randrange(1, 7)))]
        for temperature in {s.rules.temperature for s in some}:
            alike = [s for s in some if s.rules.temperature == temperature]
            found = learner_logprobs(model, [s.ids for s in alike], rng.choice([0, 100]), temperature)
            for seq, row in zip(alike, found, strict=True):
                assert seq.logprobs == row[seq.prompt_len :]


def played(model: torch.nn.Module, seed: int, **options: Any) -> tuple[Engine, list[Sequence]]:
    """A mixed workload: shared prefixes, several samples, cuts, greedy rows, prompts of all lengths."""
    engine = Engine(model, eos_ids=set(), settings=EngineSettings(exact=True, kv_bytes=1 << 22, **options))
    rng = random.Random(seed)
    base = [rng.randrange(3, 97) for _ in range(70)]
    seqs: list[Sequence] = []
    for i in range(8):
        prompt = base[: rng.randrange(1, 71)] + [rng.randrange(3, 97) for _ in range(rng.randrange(1, 20))]
        rules = Rules(max_tokens=rng.randrange(1, 12), seed=i, temperature=rng.choice([1.0, 0.7, 0.0]), top_k=i % 3 * 5)
        seqs += engine.submit(prompt, rules, n=rng.choice([1, 1, 5]))
    engine.run_until_done()
    assert engine.pool.held == 0
    return engine, seqs


ALONE: dict[str, Any] = {"max_running": 1, "chunk_tokens": 16, "page_size": 4}


@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    page_size=st.sampled_from([2, 4, 16]),
    chunk_tokens=st.sampled_from([3, 17, 64, 2048]),
    max_running=st.sampled_from([2, 7, 512]),
)
def test_any_batching_gives_bitwise_the_learners_logprobs(
    seed: int, page_size: int, chunk_tokens: int, max_running: int
) -> None:
    options = {"page_size": page_size, "chunk_tokens": chunk_tokens, "max_running": max_running}
    _, seqs = played(MODEL, seed, **options)
    assert_bitwise(MODEL, seqs, random.Random(seed))


def test_ids_and_logprobs_are_those_of_a_request_alone_even_with_preemption() -> None:
    page = 2 * 2 * 2 * 16 * 4 * 4
    results = []
    for pages, options in ((22, {"page_size": 4, "chunk_tokens": 30}), (2000, ALONE)):
        engine = Engine(MODEL, eos_ids=set(), settings=EngineSettings(exact=True, kv_bytes=pages * page, **options))
        rules = [Rules(max_tokens=24, seed=i, temperature=i % 2, top_k=i % 3 * 5) for i in range(6)]
        seqs = [engine.submit([5 + i, 9, 7, 6, 8, 4], some)[0] for i, some in enumerate(rules)]
        engine.run_until_done()
        results.append([(s.ids, s.logprobs) for s in seqs])
        assert (engine.scheduler.preempted > 0) == (pages == 22)
    assert results[0] == results[1]


def test_a_live_fork_and_new_weights_stay_exact(make_llama: Make) -> None:
    model = make_llama(vocab_size=97)
    engine = Engine(model, eos_ids=set(), settings=EngineSettings(exact=True, kv_bytes=1 << 22, page_size=4))
    [seq] = engine.submit([5, 6, 7, 8, 9, 10], Rules(max_tokens=30, seed=1))
    for _ in range(6):
        engine.step()
    twins = [engine.fork(seq, Rules(max_tokens=9, seed=i)) for i in range(5)]
    engine.run_until_done()
    assert_bitwise(model, [seq, *twins], random.Random(0))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.01)
    engine.weights_changed()
    [again] = engine.submit(seq.ids[:20], Rules(max_tokens=5, seed=1))
    engine.run_until_done()
    assert_bitwise(model, [again], random.Random(0))


INEXACT = {"Qwen3Moe": "exact mode has no form of the operation", "GptOss": "attention sinks .* have no form here"}
EXACT = [(family, over) for family, over in FAMILIES if family not in INEXACT]


@pytest.mark.parametrize(("family", "over"), EXACT, ids=[f for f, _ in EXACT])
def test_every_family_is_exact(family: str, over: dict[str, Any]) -> None:
    model = build(family, over)
    engine = Engine(
        model, eos_ids=set(), settings=EngineSettings(exact=True, kv_bytes=1 << 22, page_size=8, chunk_tokens=30)
    )
    prompts = [[3 + (5 * i + j) % 90 for j in range(2 + 23 * i)] for i in range(4)]
    seqs = [s for i, p in enumerate(prompts) for s in engine.submit(p, Rules(max_tokens=5, seed=i), n=1 + i % 2)]
    engine.run_until_done()
    assert_bitwise(model, seqs, random.Random(0))


@pytest.mark.parametrize("family", INEXACT)
def test_a_family_without_an_exact_form_is_refused_by_name(family: str) -> None:
    with pytest.raises(UserError, match=INEXACT[family]):
        test_every_family_is_exact(family, dict(FAMILIES)[family])


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_are_exact(make_llama: Make) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(make_llama(vocab_size=97), lora)
    _, seqs = played(model, 3)
    assert_bitwise(model, seqs, random.Random(0))


def test_greedy_choices_match_transformers() -> None:
    engine = Engine(MODEL, eos_ids=set(), settings=EngineSettings(exact=True, kv_bytes=1 << 22))
    [seq] = engine.submit([5, 6, 7, 8], Rules(max_tokens=12, temperature=0))
    engine.run_until_done()
    ids = torch.tensor([[5, 6, 7, 8]])
    out = MODEL.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert seq.ids == out[0].tolist()


@pytest.mark.parametrize("window", [None, 6])
def test_gradients_match_a_plain_forward(window: int | None) -> None:
    over = {"sliding_window": window} if window else {}
    model = build("Mistral" if window else "Llama", over)
    model.gradient_checkpointing_enable()
    model.train()
    ids = torch.randint(3, 97, (3, 40))
    forward = ExactForward(kernels=False)
    grads = []
    for exact in (False, True):
        model.zero_grad()
        if exact:
            with forward.attention(model):
                with forward.operations():
                    logits = model(input_ids=ids, use_cache=False).logits
                forward.token_logprobs(logits, ids, 0.7).sum().backward()
        else:
            logits = model(input_ids=ids, use_cache=False).logits / 0.7
            logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)


def test_grad_mode_and_training_mode_change_no_bit() -> None:
    rows = [[3 + i, *range(5, 40 + i)] for i in range(5)]
    still = learner_logprobs(MODEL, rows)
    MODEL.train()
    try:
        assert learner_logprobs(MODEL, rows, grad=True) == still
    finally:
        MODEL.eval()


def test_layers_without_an_exact_form_are_refused_by_name() -> None:
    x = torch.randn(3, 4)
    with ExactMode(kernels=False):
        with pytest.raises(UserError, match=r"aten\.var"):
            x.var()
        with pytest.raises(UserError, match=r"other dimensions than the last"):
            x.sum(0)
        assert torch.arange(5).sum() == 10


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("k", "n"), [(16, 32), (33, 17), (128, 352), (352, 128), (576, 1536)])
def test_a_row_does_not_depend_on_its_position_in_the_batch(threads: int, k: int, n: int) -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = torch.randn(100, k), torch.randn(n, k).t()
        whole = blocks.product(a, b)
        torch.testing.assert_close(whole, a @ b, atol=1e-3, rtol=1e-4)
        for _ in range(20):
            some = torch.randperm(100)[: random.randrange(1, 100)]
            assert blocks.product(a[some], b).equal(whole[some])
            assert blocks.by_row(lambda x: x.mean(-1), a[some]).equal(blocks.by_row(lambda x: x.mean(-1), a)[some])
            assert blocks.by_element(torch.exp, a[some]).equal(blocks.by_element(torch.exp, a)[some])
    finally:
        torch.set_num_threads(before)
