"""Exact mode with the GPU's kernels: in Triton's interpreter, or on the GPU if there is one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

pytest.importorskip("triton")

from tests.support.interpreter import hasten_interpreter
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.exact.forward import ExactForward, attend_batch
from upshot.engine.kernels import exact, plain
from upshot.engine.sequence import Rules

hasten_interpreter()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
Make = Callable[..., LlamaForCausalLM]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n", "bias"), [(48, 40, False), (33, 70, True), (128, 64, True)])
def test_a_row_of_a_product_is_the_same_in_any_batch(dtype: torch.dtype, k: int, n: int, bias: bool) -> None:
    torch.manual_seed(0)
    a = torch.randn(130, k, device=DEVICE, dtype=dtype)
    b = torch.randn(n, k, device=DEVICE, dtype=dtype).t()
    c = torch.randn(n, device=DEVICE, dtype=dtype) if bias else None
    whole = exact.product(a, b, c)
    expected = a.float() @ b.float() + (0 if c is None else c.float())
    torch.testing.assert_close(whole.float(), expected, atol=TOLERANCE[dtype] * 10, rtol=TOLERANCE[dtype])
    for start, stop in ((0, 1), (5, 6), (60, 70), (129, 130), (3, 67)):
        assert exact.product(a[start:stop], b, c).equal(whole[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_means_and_logprobs_of_a_row_are_the_same_in_any_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 5000, device=DEVICE, dtype=dtype)
    ids = torch.randint(0, 5000, (20,), device=DEVICE)
    temperature = torch.tensor([1.0, 0.7, 0.0, 2.0] * 5, device=DEVICE)
    means, logprobs = exact.mean(x), exact.pick_logprobs(x, ids, temperature)
    torch.testing.assert_close(means.float(), x.float().mean(-1), atol=1e-3, rtol=1e-3)
    scaled = x.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    torch.testing.assert_close(logprobs, scaled.log_softmax(-1).gather(-1, ids[:, None])[:, 0], atol=1e-4, rtol=1e-5)
    for start, stop in ((0, 1), (7, 8), (3, 9), (19, 20)):
        assert exact.mean(x[start:stop]).equal(means[start:stop])
        assert exact.pick_logprobs(x[start:stop], ids[start:stop], temperature[start:stop]).equal(logprobs[start:stop])


@settings(max_examples=5 if DEVICE.type == "cpu" else 50, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    dim=st.sampled_from([16, 24]),
    length=st.integers(1, 150),
    page=st.sampled_from([4, 16]),
    window=st.sampled_from([0, 0, 7, 70]),
    softcap=st.sampled_from([0.0, 0.0, 3.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_a_query_gets_the_same_result_in_any_chunk(
    seed: int,
    kv_heads: int,
    group: int,
    dim: int,
    length: int,
    page: int,
    window: int,
    softcap: float,
    dtype: torch.dtype,
) -> None:
    """The batch of a learner compared with pages in any order, chunks of any length and single queries."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    q = torch.randn(2, kv_heads * group, length, dim, device=DEVICE, dtype=dtype)
    k, v = (torch.randn(2, kv_heads, length, dim, device=DEVICE, dtype=dtype) for _ in range(2))
    options = plain.AttentionOptions(0.25, window, softcap)
    whole = attend_batch(q, k, v, options, kernels=True)
    expected = plain.attention(q.float(), k.float(), v.float(), None, options).transpose(1, 2)
    torch.testing.assert_close(whole.float(), expected, atol=TOLERANCE[dtype] * 5, rtol=TOLERANCE[dtype] * 5)
    count = -(-length // page)
    order = rng.sample(range(count), count)
    spare = count * page - length
    paged = []
    for x in (k, v):
        pages = torch.nn.functional.pad(x[1], (0, 0, 0, spare)).view(kv_heads, count, page, dim).transpose(0, 1)
        cache = torch.zeros(count, kv_heads, page, dim, device=DEVICE, dtype=dtype)
        cache[order] = pages
        paged.append(cache)
    table = torch.tensor([order], dtype=torch.int32, device=DEVICE)
    start = 0
    while start < length:
        n = min(rng.choice([1, 3, 20, 64]), length - start)
        blocks = torch.tensor([[0], [0], [n], [start]], dtype=torch.int32, device=DEVICE)
        packed = q[1, :, start : start + n].transpose(0, 1)
        out = exact.attend(packed, *paged, table, blocks, options, queries=n)
        assert out.equal(whole[1, start : start + n])
        start += n


def small(make_llama: Make, **over: object) -> LlamaForCausalLM:
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1 if DEVICE.type == "cpu" else 3,
    }
    return make_llama(**sizes, vocab_size=64, max_position_embeddings=256, **over).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES[:1] if DEVICE.type == "cpu" else DTYPES)
def test_engine_and_learner_agree_bitwise_on_the_kernels(make_llama: Make, dtype: torch.dtype) -> None:
    model = small(make_llama).to(dtype)
    options = EngineSettings(
        page_size=4,
        kernels=True,
        exact=True,
        max_running=5,
        kv_bytes=1 << 20,
        chunk_tokens=24,
        check=DEVICE.type == "cuda",
    )
    engine = Engine(model, eos_ids=set(), settings=options)
    prompt = [3 + (7 * i) % 60 for i in range(22)]
    seqs = engine.submit(prompt, Rules(max_tokens=3, seed=3), n=4)
    seqs += engine.submit([9, 8, 7], Rules(max_tokens=2, seed=4))
    seqs += engine.submit(prompt[:17], Rules(max_tokens=2, seed=5, top_k=3))
    engine.run_until_done()
    forward = ExactForward(kernels=True)
    longest = max(len(s.ids) for s in seqs)
    ids = torch.tensor([s.ids + [0] * (longest - len(s.ids)) for s in seqs], device=DEVICE)
    with forward.attention(model):
        with forward.operations():
            logits = model(input_ids=ids, use_cache=False).logits
        found = forward.token_logprobs(logits, ids, 1.0)
    for row, seq in zip(found.tolist(), seqs, strict=True):
        assert row[seq.prompt_len : len(seq.ids)] == seq.logprobs
    found.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    assert engine.pool.held == 0
