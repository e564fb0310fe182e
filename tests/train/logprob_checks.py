"""The kernels of log-probabilities against plain PyTorch: run by test_logprobs.py in a process of its own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from upshot.train import logprobs
from upshot.train.kernels import logprobs as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 37, 5000])
def test_kernels_read_and_turn_as_pytorch_does(vocab: int, dtype: torch.dtype, entropy: bool, cap: float) -> None:
    torch.manual_seed(0)
    rows = 5
    logits = (3 * torch.randn(rows, vocab, device=DEVICE)).to(dtype)
    targets = torch.randint(0, vocab, (rows,), device=DEVICE)
    grads = torch.randn(2, rows, device=DEVICE)
    found = kernels.read(logits, targets, 1 / 0.7, cap, entropy)
    host = logits.cpu()
    expected = logprobs._read(host, targets.cpu(), 1 / 0.7, cap, entropy)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a.cpu(), b, atol=2e-5)
    spread = grads[1] if entropy else None
    kernels.turn(logits, targets, found[1], found[2], grads[0], spread, 1 / 0.7, cap)
    turned = (targets.cpu(), *expected[1:], grads[0].cpu(), None if spread is None else spread.cpu())
    logprobs._turn(host, *turned, 1 / 0.7, cap)
    assert torch.allclose(logits.cpu().float(), host.float(), atol=1e-5 if dtype == torch.float32 else 2e-2)
