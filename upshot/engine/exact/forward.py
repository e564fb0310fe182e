"""The learner's forward in exact mode: attention and log-probabilities, bitwise equal to the engine's.

`ExactForward` is used by the learner, and by llama/select.py to check the engine's exact driver. Attention is the
engine's own, over the batch's keys and values instead of pages. Padding must be on the right: every query sees only
what comes before it. The backward passes are PyTorch's, on the same inputs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from upshot.engine.exact import blocks
from upshot.engine.exact.mode import ExactMode
from upshot.engine.kernels import plain
from upshot.engine.kernels.plain import AttentionOptions
from upshot.engine.llama.attention import attend_by
from upshot.engine.llama.shape import causal_lm, configs_of


def pick_logprobs(logits: Tensor, ids: Tensor, temperature: Tensor, kernels: bool) -> Tensor:
    """log softmax(logits / temperature) at `ids`, one row each, float32; temperature 0 counts as 1."""
    if not kernels:
        return blocks.pick_logprobs(logits, ids, temperature)
    from upshot.engine.kernels import exact

    return exact.pick_logprobs(logits, ids, temperature)


class PickedLogprobs(torch.autograd.Function):
    """`pick_logprobs` with the gradient of log softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Any, ids: Any, temperature: float, kernels: bool) -> Tensor:
        """Log-probabilities of the ids [rows], one per row of logits [rows, vocab]."""
        ctx.save_for_backward(logits, ids)
        ctx.temperature = temperature
        with _disable_current_modes():
            every = torch.full((len(ids),), temperature, dtype=torch.float32, device=logits.device)
            return pick_logprobs(logits, ids, every, kernels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """(one-hot − softmax) / temperature, in float32."""
        logits, ids = ctx.saved_tensors
        temperature = ctx.temperature if ctx.temperature > 0 else 1.0
        out = torch.empty_like(logits)
        for start in range(0, len(ids), 2048):  # a few rows at a time, to bound the float32 memory
            some = slice(start, start + 2048)
            part = (logits[some].float() / temperature).softmax(-1).neg_()
            part.scatter_add_(-1, ids[some, None], torch.ones_like(part[:, :1]))
            out[some] = part.mul_((grad[some] / temperature)[:, None])
        return out, None, None, None


def attend_batch(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, kernels: bool) -> Tensor:
    """Causal attention of [rows, heads, length, dim] as the engine computes it; returns [rows, length, heads, dim]."""
    rows, heads, length, dim = q.shape
    packed = q.transpose(1, 2).reshape(rows * length, heads, dim)
    if kernels:
        from upshot.engine.kernels import exact

        table = torch.arange(rows, dtype=torch.int32, device=q.device)[:, None]
        first = torch.arange(0, length, exact.QUERIES, dtype=torch.int32, device=q.device).repeat(rows, 1)
        each = torch.stack(
            [table.expand_as(first), table * length + first, (length - first).clamp(max=exact.QUERIES), first]
        )
        out = exact.attend(packed, k, v, table, each.view(4, -1), options)
    else:
        spare = -length % blocks.KEYS
        cells = F.pad(torch.arange(rows * length).view(rows, length), (0, spare))
        counts = torch.full((rows,), length)
        keys, values = (x.transpose(1, 2).reshape(rows * length, -1, dim) for x in (k, v))
        tiles = blocks.tiles_of(torch.zeros_like(counts), counts, cells)
        out = blocks.attend(packed, keys, values, tiles, options)
    return out.view(rows, length, heads, dim)


class ExactAttention(torch.autograd.Function):
    """Attention with the engine's exact forward and PyTorch's backward."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, kernels: bool, options: AttentionOptions) -> Tensor:
        """Attention as the engine computes it."""
        ctx.save_for_backward(q, k, v)
        ctx.options = options
        with _disable_current_modes():
            return attend_batch(q, k, v, options, kernels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of PyTorch's attention."""
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            q, k, v = inputs
            out = plain.attention(q, k, v, None, ctx.options).transpose(1, 2)
        return (*torch.autograd.grad(out, inputs, grad), None, None)


class ExactForward:
    """Contexts and functions with which a learner computes bitwise what the engine reports."""

    def __init__(self, kernels: bool) -> None:
        self.kernels = kernels
        """Use the GPU's kernels (always on a GPU; on the CPU in Triton's interpreter, for tests)."""
        self._mode = ExactMode(kernels)
        plain.choose_attention_without_cudnn()

    def attention(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Inside, the model attends as the engine does. Keep it on in the backward pass, which may recompute layers."""
        return attend_by(self._attend, configs_of(causal_lm(model)))

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        if options.dropout:
            raise NotImplementedError(f"attention dropout ({options.dropout}) has no exact form")
        return ExactAttention.apply(q, k, v, self.kernels, options)  # type: ignore[no-any-return]

    def operations(self) -> AbstractContextManager[Any]:
        """Inside, operations have their exact forms; for the forward pass only."""
        return self._mode

    def token_logprobs(self, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        """Log-probability [rows, length] of every token given those before it; 0 at position 0."""
        wanted = ids.roll(-1, 1)
        picked = PickedLogprobs.apply(logits.flatten(0, 1), wanted.flatten(), temperature, self.kernels).view(ids.shape)
        return torch.nn.functional.pad(picked[:, :-1], (1, 0))
