"""Attention of long runs in two parts, compared with one masked attention in float64; on the CPU, by PyTorch's own
kernel."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from upshot.engine.kernels.long import lay_out, long_attention, long_attention_backward, run_forward
from upshot.engine.kernels.plain import AttentionOptions
from upshot.training.learner.batch import end_to_end
from upshot.training.learner.forward import attention
from upshot.training.learner.forward.attention import PackedAttention

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3


def draw(keys: int, queries: int) -> list[Tensor]:
    shapes = [(queries, HEADS, DIM), (keys, KV_HEADS, DIM), (keys, KV_HEADS, DIM)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places = torch.arange(len(k))
    mask = places[None] <= places[len(k) - len(q) :, None]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 60), st.sampled_from([4, 8, 16]), st.integers(0, 99))
def test_a_run_at_the_end_of_its_keys_matches_masked_attention(
    queries: int, before: int, grain: int, seed: int
) -> None:
    torch.manual_seed(seed)
    q, k, v = draw(before + queries, queries)
    wanted = masked_attention(q, k, v)
    grad = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, (q, k, v), grad)
    with torch.no_grad():
        out = long_attention(q, k, v, SCALE, grain)
        part = run_forward(lay_out(q, k, v, grain), SCALE)
        computed = long_attention_backward(grad, q, k, v, out, part, SCALE, grain)
    torch.testing.assert_close(out, wanted)
    for ours, theirs in zip(computed, gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 600), st.integers(0, 3000))
def test_lengths_are_rounded_so_that_plans_are_reused(queries: int, before: int) -> None:
    q = torch.empty(queries, 1, 8)
    run = lay_out(q, *(torch.empty(before + queries, 1, 8) for _ in range(2)), grain=512)
    assert run.q.shape[2] % 512 == 0
    assert run.before is None or run.before[0].shape[2] % 512 == 0
    assert run.own[0].shape[2] == run.q.shape[2]


def test_the_learner_takes_long_segments_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "cudnn_takes", lambda q: True)
    monkeypatch.setattr(attention, "SHORTEST", 4)
    lengths = [9, 17, 4]
    spans = PackedAttention(end_to_end(lengths), torch.device("cpu"))
    q, k, v = draw(sum(lengths), sum(lengths))
    out = spans.attend(0, q, k, v, AttentionOptions(SCALE))
    assert type(out.grad_fn).__name__ == "LongSegmentsBackward"
    pieces = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    wanted = torch.cat([masked_attention(*piece) for piece in pieces])
    torch.testing.assert_close(out, wanted)
    grad = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad(x, (q, k, v), grad) for x in (out, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_backward_pass_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "cudnn_takes", lambda q: True)
    monkeypatch.setattr(attention, "SHORTEST", 4)
    spans = PackedAttention(end_to_end([9, 7]), torch.device("cpu"))
    q, k, v = draw(16, 16)
    out = spans.attend(0, q, k, v, AttentionOptions(SCALE))
    result = weakref.ref(out)
    gc.collect()
    gc.disable()
    try:
        out.sum().backward()
        del out
        assert result() is None, "a cycle would keep every layer's activations until the next collection"
    finally:
        gc.enable()


@pytest.mark.parametrize("how", [{"window": 8}, {"softcap": 5.0}, {"dropout": 0.1}], ids=str)
def test_windows_caps_and_dropout_do_not_use_the_kernel_for_long_runs(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, float]
) -> None:
    monkeypatch.setattr(attention, "cudnn_takes", lambda q: True)
    monkeypatch.setattr(attention, "SHORTEST", 4)
    spans = PackedAttention(end_to_end([16]), torch.device("cpu"))
    q, k, v = draw(16, 16)
    assert "Long" not in type(spans.attend(0, q, k, v, AttentionOptions(SCALE, **how)).grad_fn).__name__
