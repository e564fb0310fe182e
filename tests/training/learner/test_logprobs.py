"""Log-probabilities from hidden states equal those from all logits at once, for any chunk size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from upshot.training.learner.forward import packed
from upshot.training.learner.forward.packed import chunks, linear_logprobs

ROWS, HIDDEN, VOCAB = 23, 8, 41


def at_once(hidden: Tensor, head: Any, targets: Tensor, temperature: float, cap: float) -> tuple[Tensor, Tensor]:
    """The same, from all logits."""
    logits = head(hidden).float()
    logits = cap * torch.tanh(logits / cap) if cap else logits
    every = (logits / (temperature or 1)).log_softmax(-1)
    return every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 10, 1000])
@pytest.mark.parametrize(("temperature", "cap"), [(1.0, 0.0), (0.6, 2.0), (0.0, 0.0)])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_chunking_changes_no_result(
    rows: int, temperature: float, cap: float, entropy: bool, bias: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "CHUNK_BYTES", rows * VOCAB * 4)
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, requires_grad=True)
    head = nn.Linear(HIDDEN, VOCAB, bias=bias).requires_grad_(not frozen)
    targets = torch.randint(0, VOCAB, (ROWS,))
    weights = torch.randn(2, ROWS)
    found, spread = linear_logprobs(hidden, head, targets, temperature, entropy, cap)
    expected, wide = at_once(hidden, head, targets, temperature, cap)
    assert torch.allclose(found, expected, atol=1e-5)
    loss, other = (found * weights[0]).sum(), (expected * weights[0]).sum()
    if entropy:
        assert spread is not None and torch.allclose(spread, wide, atol=1e-5)
        loss, other = loss + (spread * weights[1]).sum(), other + (wide * weights[1]).sum()
    else:
        assert spread is None
    inputs = (hidden, *(() if frozen else head.parameters()))
    for a, b in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(other, inputs), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_a_second_backward_finds_its_logits_again() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(ROWS, HIDDEN, requires_grad=True), nn.Linear(HIDDEN, VOCAB, bias=False)
    head.requires_grad_(False)
    found, _ = linear_logprobs(hidden, head, torch.zeros(ROWS, dtype=torch.long))
    (first,) = torch.autograd.grad(found.sum(), hidden, retain_graph=True)
    (second,) = torch.autograd.grad(found.sum(), hidden)
    assert torch.allclose(first, second) and head.weight.grad is None


def test_chunks_fit_the_memory_and_cover_all_rows() -> None:
    for rows in (1, 7, 1000, 12_345):
        parts = chunks(rows, 150_000, 2)
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(rows))
        assert all((part.stop - part.start) * 150_000 * 2 <= packed.CHUNK_BYTES for part in parts)


def test_no_rows_give_no_log_probabilities() -> None:
    found, spread = linear_logprobs(
        torch.zeros(0, 4, requires_grad=True), nn.Linear(4, 9), torch.zeros(0).long(), 1.0, True
    )
    assert found.shape == (0,) and spread is not None and spread.shape == (0,)
    found.sum().backward()
