"""The steps of a Llama block that have a derivative of their own: what is cheap is computed again, not kept.

Each step is a matrix product with what comes before it (a norm, a gate, nothing); what is kept for the backward is the
input of the whole step. Weights that are not trained get no gradient, and nothing is kept for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from upshot.train.kernels import plain
from upshot.train.products import Product


def kernels_for(x: Tensor) -> Any:
    """The functions between the products: Triton's on a GPU, PyTorch's elsewhere."""
    if not x.is_cuda:
        return plain
    from upshot.train.kernels import block

    return block


class NormProduct(torch.autograd.Function):
    """norm(h + delta), projected (no product: itself), and h + delta; keeps the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        product: Product | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The projected rows, and the sum."""
        x, summed = kernels_for(h).add_norm(h, delta, weight, eps)
        y, thin = (x, None) if product is None else product.outputs(x)
        ctx.save_for_backward(summed, weight, thin)
        ctx.eps, ctx.product = eps, product
        return y, summed

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor, dsum: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of h, delta, the norm's weight and the projections' parameters."""
        summed, weight, thin = ctx.saved_tensors
        product: Product | None = ctx.product
        needs = ctx.needs_input_grad
        kernels = kernels_for(dy)
        dy = dy.contiguous()
        dthin = None if product is None else product.thin_gradient(dy)
        again = product is not None and product.reads_input(needs[5:])
        x = d = dweight = None
        if any(needs[:3]):
            x = dy if product is None else product.input_gradient(dy, dthin)
            d, dweight = kernels.norm_backward(x, summed, weight, ctx.eps, dsum.contiguous(), needs[2], again)
        elif again:
            x, _ = kernels.add_norm(summed, None, weight, ctx.eps)
        grads = [] if product is None else product.gradients(needs[5:], dy, x, thin, dthin)
        return d if needs[0] else None, d if needs[1] else None, dweight, None, None, *grads


class Projected(torch.autograd.Function):
    """x, projected; keeps x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, product: Product, *parameters: Tensor) -> Tensor:
        """The projected rows."""
        y, thin = product.outputs(x)
        kept = x if product.reads_input(ctx.needs_input_grad[2:]) else None
        ctx.save_for_backward(kept, thin)
        ctx.product = product
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and the parameters."""
        x, thin = ctx.saved_tensors
        product: Product = ctx.product
        needs = ctx.needs_input_grad
        dy = dy.contiguous()
        dthin = product.thin_gradient(dy)
        dx = product.input_gradient(dy, dthin) if needs[0] else None
        return dx, None, *product.gradients(needs[2:], dy, x, thin, dthin)


class GateProduct(torch.autograd.Function):
    """silu(gate) × up of rows that have both side by side, projected (no product: itself); keeps gate and up.

    `hollow`: what is projected is not needed (a block computed again for its backward), so it is left out.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, hollow: bool, product: Product | None, *parameters: Tensor) -> Tensor:
        """The projected rows."""
        inner = kernels_for(x).gate(x)
        if product is None:
            y, thin = inner, None
        elif hollow:
            y, thin = x.new_empty(len(x), product.ends[-1]), product.thin(inner)
        else:
            y, thin = product.outputs(inner)
        ctx.save_for_backward(x, thin)
        ctx.product = product
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of gate and up, and of the parameters."""
        x, thin = ctx.saved_tensors
        product: Product | None = ctx.product
        needs = ctx.needs_input_grad
        kernels = kernels_for(dy)
        dy = dy.contiguous()
        if product is None:
            return kernels.gate_backward(x, dy, False), None, None
        dthin = product.thin_gradient(dy)
        again = product.reads_input(needs[3:])
        dx = inner = None
        if needs[0]:
            inner = product.input_gradient(dy, dthin)
            dx = kernels.gate_backward(x, inner, again)
        elif again:
            inner = kernels.gate(x)
        return dx, None, None, *product.gradients(needs[3:], dy, inner, thin, dthin)


class Turned(torch.autograd.Function):
    """Queries and keys rotated (and normed before, where `eps` is given), and values, out of the joined product."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv_heads: int,
        eps: float | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [tokens, heads, dim]."""
        norms = None if eps is None else (q_weight, k_weight, eps)
        ctx.save_for_backward(cos, sin, None if norms is None else qkv, q_weight, k_weight)
        ctx.eps = eps
        return kernels_for(qkv).turn(qkv.detach(), (cos, sin), heads, kv_heads, norms)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the joined product and of the head norms' weights."""
        cos, sin, raw, q_weight, k_weight = ctx.saved_tensors
        norms = None if ctx.eps is None else (q_weight, k_weight, ctx.eps)
        wants = any(ctx.needs_input_grad[6:])
        out, of_q, of_k = kernels_for(dq).turn_backward(dq, dk, dv, (cos, sin), raw, norms, wants)
        return out, None, None, None, None, None, of_q, of_k
