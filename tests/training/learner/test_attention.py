"""Attention over flat tokens equals that of each sequence alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from upshot.engine.kernels.plain import AttentionOptions
from upshot.training.learner.batch import Layout, end_to_end, tree
from upshot.training.learner.forward.attention import PackedAttention

SCALE = 0.3


def alone(layout: Layout, q: Tensor, k: Tensor, v: Tensor, window: int, softcap: float) -> Tensor:
    """Each sequence by itself, in plain arithmetic."""
    out = torch.zeros_like(q)
    for path in layout.paths:
        at = torch.from_numpy(layout.places(path))
        keys, values = (x[at].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[at], keys) * SCALE
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        back = torch.arange(len(at))[:, None] - torch.arange(len(at))
        hidden = (back < 0) | (back >= (window or len(at)))
        own = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
        out = out.index_copy(0, at, own)
    return out


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=6),
    st.sampled_from([0, 1, 6, 50]),
    st.sampled_from([0.0, 2.0]),
    st.booleans(),
)
def test_flat_attention_is_that_of_every_sequence_alone(
    shapes: list[tuple[int, int]], window: int, softcap: float, share: bool
) -> None:
    torch.manual_seed(0)
    sequences = [np.array([*range(begun), *[40 + i] * own], dtype=np.int32) for i, (begun, own) in enumerate(shapes)]
    layout = tree(sequences, 4) if share else end_to_end([len(ids) for ids in sequences])
    q, k, v = (torch.randn(layout.tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    found = PackedAttention(layout, torch.device("cpu")).attend(0, q, k, v, AttentionOptions(SCALE, window, softcap))
    expected = alone(layout, q, k, v, window, softcap)
    assert torch.allclose(found, expected, atol=1e-5)
    weights = torch.randn_like(found)
    for a, b in zip(*(torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (found, expected)), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("window", [0, 6, 100])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("heads", "dim"), [((4, 4), 64), ((9, 3), 64), ((32, 8), 128)])
def test_flash_attention_agrees_on_the_device(heads: tuple[int, int], dim: int, share: bool, window: int) -> None:
    torch.manual_seed(0)
    shapes = [(200, 130), (200, 1), (64, 70), (0, 9), (200, 257)]
    sequences = [np.array([*range(begun), *[500 + i] * own], dtype=np.int32) for i, (begun, own) in enumerate(shapes)]
    layout = tree(sequences) if share else end_to_end([len(ids) for ids in sequences])
    sizes = (heads[0], heads[1], heads[1])
    rough = [torch.randn(layout.tokens, n, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in sizes]
    exact = [x.detach().float().requires_grad_() for x in rough]
    attention = PackedAttention(layout, torch.device("cuda"))
    found = [attention.attend(0, *inputs, AttentionOptions(SCALE, window)) for inputs in (rough, exact)]
    assert (found[0].float() - found[1]).abs().max() < 0.05
    weights = torch.randn_like(found[1])
    loose = torch.autograd.grad((found[0].float() * weights).sum(), rough)
    tight = torch.autograd.grad((found[1] * weights).sum(), exact)
    for a, b in zip(loose, tight, strict=True):
        assert (a.float() - b).norm() / b.norm() < 0.02
