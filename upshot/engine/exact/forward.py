"""The learner's forward in exact mode, and the log-probabilities of given ids, on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from upshot.engine.exact import blocks
from upshot.engine.exact.attention import NAME, exact_attention, kernels_in_use
from upshot.engine.exact.mode import ExactMode
from upshot.engine.llama.driver import causal_lm, configs_of


def picked(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, kernels: bool) -> torch.Tensor:
    """log softmax(logits / temperature) at `ids`, one row each, float32; temperature 0 counts as 1."""
    if not kernels:
        return blocks.picked(logits, ids, temperature)
    from upshot.engine.kernels import exact

    return exact.picked(logits, ids, temperature)


class PickedLogprobs(torch.autograd.Function):
    """`picked` with the gradient of the softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Any, ids: Any, temperature: float, kernels: bool) -> torch.Tensor:
        """Log-probabilities of the ids, one a row of logits [rows, vocab]."""
        ctx.save_for_backward(logits, ids)
        ctx.temperature = temperature
        with _disable_current_modes():
            every = torch.full((len(ids),), temperature, dtype=torch.float32, device=logits.device)
            return picked(logits, ids, every, kernels)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """(one-hot − softmax) / temperature, in float32."""
        logits, ids = ctx.saved_tensors
        temperature = ctx.temperature if ctx.temperature > 0 else 1.0
        out = torch.empty_like(logits)
        for start in range(0, len(ids), 2048):  # a few rows at a time: in float32 all of them would be much memory
            some = slice(start, start + 2048)
            part = (logits[some].float() / temperature).softmax(-1).neg_()
            part.scatter_add_(-1, ids[some, None], torch.ones_like(part[:, :1]))
            out[some] = part.mul_((grad[some] / temperature)[:, None])
        return out, None, None, None


class ExactForward:
    """What a learner needs to compute what the engine reports."""

    def __init__(self, kernels: bool) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, exact_attention)
        self.kernels = kernels
        """Use the GPU's kernels (always on a GPU; on the CPU by Triton's interpreter, for tests)."""
        self._mode = ExactMode(kernels)

    @contextmanager
    def attention(self, model: torch.nn.Module) -> Iterator[None]:
        """Inside: the model attends as the engine does. Keep it on for the backward pass, which may compute again."""
        configs = configs_of(causal_lm(model))
        before = [config._attn_implementation for config in configs]
        kernels_in_use.append(self.kernels)
        try:
            for config in configs:
                config._attn_implementation = NAME
            yield
        finally:
            kernels_in_use.pop()
            for config, implementation in zip(configs, before, strict=True):
                config._attn_implementation = implementation

    @contextmanager
    def operations(self) -> Iterator[None]:
        """Inside: operations in their exact forms. For the forward pass only."""
        with self._mode:
            yield

    def token_logprobs(self, logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
        """Log-probability of every token given those before it [rows, length]; position 0 gets 0."""
        wanted = ids.roll(-1, 1)
        found = PickedLogprobs.apply(logits.flatten(0, 1), wanted.flatten(), temperature, self.kernels).view(ids.shape)
        return torch.nn.functional.pad(found[:, :-1], (1, 0))
