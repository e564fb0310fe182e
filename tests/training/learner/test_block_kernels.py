"""The kernels between a block's products compared with autograd: in Triton's interpreter, or on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from tests.support.interpreter import hasten_interpreter
from tests.training.learner import test_lean
from upshot.engine.kernels import gpu, plain
from upshot.engine.kernels.plain import EARLY, GELU, LATE, OFFSET, SILU, HeadNorms, rotate
from upshot.training.learner.forward import lean

hasten_interpreter()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
KINDS = [torch.float32, torch.bfloat16]
FORMS = st.sampled_from([EARLY, LATE, OFFSET])


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def near(found: Tensor, expected: Tensor) -> None:
    """`expected` was computed in float32; the result may have been rounded once or twice."""
    relative = 1e-5 if found.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected, atol=relative * float(expected.abs().max()), rtol=relative)


def wide(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().float().requires_grad_() for t in tensors]


@pytest.mark.parametrize("dtype", KINDS)
@settings(max_examples=3, deadline=None)
@given(rows=st.integers(1, 6), n=st.sampled_from([8, 24]), weight=st.booleans(), again=st.booleans(), form=FORMS)
def test_the_gradient_of_the_norm_matches_autograd(
    dtype: torch.dtype, rows: int, n: int, weight: bool, again: bool, form: int
) -> None:
    h, delta, dy, dsum = (drawn(rows, n, dtype=dtype) for _ in range(4))
    w = drawn(n, dtype=dtype)
    x, summed = gpu.add_norm(h, delta, w, 1e-5, form)
    given_dy = dy.clone()
    d, dw = gpu.norm_backward(given_dy, summed, w, 1e-5, dsum, weight, again, form)
    s32, w32 = wide(summed, w)
    expected = F.rms_norm(s32, (n,), w32 + (form == OFFSET), 1e-5)
    torch.autograd.backward([expected, s32], [dy.float(), dsum.float()])
    near(d, s32.grad)
    assert (dw is not None) == weight
    if dw is not None:
        assert dw.dtype == dtype
        near(dw, w32.grad)
    near(given_dy, (x if again else dy).float())
    there, _ = plain.norm_backward(dy.clone(), summed, w, 1e-5, dsum, weight, again, form)
    near(there, s32.grad)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("n", "act"), [(12, SILU), (1030, SILU), (12, GELU)])
def test_the_gradient_of_the_gate_matches_autograd(dtype: torch.dtype, again: bool, n: int, act: int) -> None:
    x, dy = drawn(3, 2 * n, dtype=dtype), drawn(3, n, dtype=dtype)
    given_dy = dy.clone()
    dx = gpu.gate_backward(x.clone(), given_dy, again, act)  # both overwrite their inputs
    (x32,) = wide(x)
    first, second = x32.chunk(2, -1)
    ((F.silu(first) if act == SILU else F.gelu(first, approximate="tanh")) * second).backward(dy.float())
    near(dx, x32.grad)
    there_dy = dy.clone()
    near(plain.gate_backward(x.clone(), there_dy, again, act), x32.grad)
    for written in (given_dy, there_dy):
        near(written, (gpu.gate(x, act) if again else dy).float())


@pytest.mark.parametrize("dtype", KINDS)
@settings(max_examples=3, deadline=None)
@given(
    tokens=st.integers(1, 3),
    heads=st.sampled_from([(4, 2), (9, 3), (3, 1), (17, 1)]),
    dim=st.sampled_from([8, 12]),
    form=st.sampled_from([None, EARLY, OFFSET]),
    part=st.booleans(),
    strided=st.booleans(),
)
def test_heads_are_rotated_there_and_back(
    dtype: torch.dtype, tokens: int, heads: tuple[int, int], dim: int, form: int | None, part: bool, strided: bool
) -> None:
    normed = form is not None
    (many, few), sizes = heads, [heads[0], heads[1], heads[1]]
    qkv = drawn(tokens, sum(sizes) * dim, dtype=dtype)
    angles = torch.randn(tokens, dim // 4 if part and not normed else dim // 2, device=DEVICE)
    rotation = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = drawn(dim, dtype=dtype), drawn(dim, dtype=dtype)
    norms = HeadNorms(*weights, 1e-5, form) if form is not None else None
    raw32, q32, k32 = wide(qkv, *weights)
    cos, sin = (torch.cat([x, x], -1)[:, None].float() for x in rotation)
    q, k, v = raw32.view(tokens, -1, dim).split(sizes, 1)
    if normed:
        q, k = (F.rms_norm(x, (dim,), w + (form == OFFSET), 1e-5) for x, w in ((q, q32), (k, k32)))
    expected = [rotate(q, cos, sin), rotate(k, cos, sin), v]
    given_d = [drawn(tokens, n, dim, dtype=dtype) for n in sizes]
    torch.autograd.backward(expected, [d.float() for d in given_d])
    if strided:
        given_d = list(torch.cat(given_d, 1).split(sizes, 1))
    for kernels in (plain, gpu):  # the second rotates in place
        raw = qkv.clone()
        for found, wanted in zip(kernels.rotate_heads(raw, rotation, many, few, norms), expected, strict=True):
            near(found, wanted.detach())
        dqkv, of_q, of_k = kernels.rotate_heads_backward(*given_d, rotation, qkv if normed else None, norms, normed)
        assert dqkv.is_contiguous()
        near(dqkv, raw32.grad)
        if normed:
            near(of_q, q32.grad)
            near(of_k, k32.grad)


@pytest.mark.parametrize(("family", "lora"), [("Qwen3", False), ("SmolLM3", True), ("Gemma3", False), ("Phi3", True)])
def test_the_whole_forward_with_kernels(family: str, lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(lean, "kernels_for", lambda x: gpu)
    model: Any = test_lean.build(family, layers=2)
    model = test_lean.with_lora(model) if lora else model
    test_lean.compare(model.to(DEVICE), [2, 1], checkpoint=2)
