"""The attention function registered with transformers, and the step it serves.

transformers calls it with a layer's new queries, keys and values; the step under way stores keys and values in
pages and attends to the pages of each sequence. The learner's forward never sees it: the model's attention setting
is ours only inside `driving`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

NAME = "upshot_pages"


class AttentionStep(Protocol):
    """The batch of one step: knows the pages, lengths and positions of its tokens."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Store k, v [tokens, kv_heads, dim]; attention output for q [tokens, heads, dim] in the same shape."""
        ...


_active: list[AttentionStep] = []


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer for all tokens of the step, in the form transformers calls."""
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention sinks (s_aux) cannot be driven by the engine")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = _active[-1].attend(int(module.layer_idx), q, k, v, scale, sliding_window or 0, softcap or 0.0)  # type: ignore[arg-type]
    return out[None], None


def register() -> None:
    """Make the function known to transformers (once is enough)."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)


@contextmanager
def driving(configs: list[Any], quiet: list[torch.nn.Module], step: AttentionStep) -> Iterator[None]:
    """Inside: the model attends through `step`; `quiet` modules (dropout, checkpointing) are out of training mode."""
    before = [config._attn_implementation for config in configs]
    loud = [module for module in quiet if module.training]
    _active.append(step)
    try:
        for config in configs:
            config._attn_implementation = NAME
        for module in loud:
            module.training = False
        yield
    finally:
        _active.pop()
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
        for module in loud:
            module.training = True
