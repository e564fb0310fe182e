"""Log-probabilities from hidden states: those of all logits at once, whatever the chunks; the kernels too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from upshot.train import logprobs
from upshot.train.logprobs import chunks, linear_logprobs

ROWS, HIDDEN, VOCAB = 23, 8, 41


def at_once(hidden: Tensor, head: Any, targets: Tensor, temperature: float, cap: float) -> tuple[Tensor, Tensor]:
    """The same by way of all logits."""
    logits = head(hidden).float()
    logits = cap * torch.tanh(logits / cap) if cap else logits
    every = (logits / (temperature or 1)).log_softmax(-1)
    return every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 10, 1000])
@pytest.mark.parametrize(("temperature", "cap"), [(1.0, 0.0), (0.6, 2.0), (0.0, 0.0)])
@pytest.mark.parametrize("entropy", [False, True])
def test_chunks_change_nothing(
    rows: int, temperature: float, cap: float, entropy: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", rows * VOCAB * 4)
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, requires_grad=True)
    head = nn.Linear(HIDDEN, VOCAB, bias=bias)
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
    inputs = (hidden, *head.parameters())
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


def test_no_chunk_is_larger_than_its_memory_and_all_rows_are_in_one() -> None:
    for rows in (1, 7, 1000, 12_345):
        parts = chunks(rows, 150_000, 2)
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(rows))
        assert all((part.stop - part.start) * 150_000 * 2 <= logprobs.CHUNK_BYTES for part in parts)


def test_no_rows_are_no_log_probabilities() -> None:
    found, spread = linear_logprobs(
        torch.zeros(0, 4, requires_grad=True), nn.Linear(4, 9), torch.zeros(0).long(), 1.0, True
    )
    assert found.shape == (0,) and spread is not None and spread.shape == (0,)
    found.sum().backward()


def run_checks(interpret: bool) -> None:
    """In a process of its own: the interpreter is chosen when Triton is first imported."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if interpret else {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command.append(str(Path(__file__).with_name("logprob_checks.py")))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_kernels_agree_with_pytorch_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_checks(interpret=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_kernels_agree_with_pytorch_on_the_device() -> None:
    run_checks(interpret=False)
