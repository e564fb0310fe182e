"""Kernels for log-probabilities and sums compared with plain PyTorch: in Triton's interpreter, or on the GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.support.interpreter import hasten_interpreter
from upshot.engine.kernels import logprobs as kernels
from upshot.engine.kernels import plain
from upshot.engine.kernels.segment_sum import segment_sums
from upshot.training.learner.batch import tree
from upshot.training.learner.forward.attention import PackedAttention

hasten_interpreter()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 37, 5000])
def test_logprobs_and_their_gradients_match_pytorch(vocab: int, dtype: torch.dtype, entropy: bool, cap: float) -> None:
    torch.manual_seed(0)
    rows = 5
    logits = (3 * torch.randn(rows, vocab, device=DEVICE)).to(dtype)
    targets = torch.randint(0, vocab, (rows,), device=DEVICE)
    grads = torch.randn(2, rows, device=DEVICE)
    found = kernels.token_logprobs(logits, targets, 1 / 0.7, cap, entropy)
    host = logits.cpu()
    expected = plain.token_logprobs(host, targets.cpu(), 1 / 0.7, cap, entropy)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a.cpu(), b, atol=2e-5)
    spread = grads[1] if entropy else None
    kernels.token_logprobs_backward(logits, targets, found[1], found[2], grads[0], spread, 1 / 0.7, cap)
    turned = (targets.cpu(), *expected[1:], grads[0].cpu(), None if spread is None else spread.cpu())
    plain.token_logprobs_backward(host, *turned, 1 / 0.7, cap)
    assert torch.allclose(logits.cpu().float(), host.float(), atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("width", [1, 24, 1500])
def test_gradients_of_shared_keys_are_those_of_taking_them(width: int) -> None:
    torch.manual_seed(0)
    sequences = [np.array([*range(n), 50 + i, 60], dtype=np.int32) for i, n in enumerate((9, 4, 0, 9, 5))]
    layout = tree(sequences, 4)
    spans = PackedAttention(layout, DEVICE)
    assert spans.keys is not None and len(spans.keys) > layout.tokens
    a, b = (torch.randn(len(spans.keys), width, device=DEVICE) for _ in range(2))
    for found, grad in zip(segment_sums(a, b, *spans.readers), (a, b), strict=True):
        expected = torch.zeros(layout.tokens, width, device=DEVICE).index_add_(0, spans.keys, grad)
        assert torch.allclose(found, expected, atol=1e-5)
