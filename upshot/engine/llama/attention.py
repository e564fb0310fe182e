"""Our attention inside transformers' own forward: one registered function for engine, learner and exact mode.

transformers calls it with a layer's new queries, keys and values, and it calls the function given to `attend_by`: the
engine's stores keys and values in pages and attends to those of each sequence, the learner's attends over flat tokens,
exact mode's is batch-invariant. The model's configuration names our function only inside `attend_by`, so other forwards
of the model are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

from torch import Tensor, nn

from upshot.engine.kernels.plain import AttentionOptions

NAME = "upshot"

Attend = Callable[[int, Tensor, Tensor, Tensor, AttentionOptions], Tensor]
"""(layer, q, k, v, options), in transformers' layout [rows, heads, length, dim] → [rows, length, heads, dim]."""


class AttentionStep(Protocol):
    """One step of the engine, with the pages, lengths and positions of its tokens."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Store k, v [tokens, kv_heads, dim]; attention output for q [tokens, heads, dim] in the same shape."""
        ...


_active: dict[int, list[tuple[Attend, bool]]] = {}
"""id of a model's configuration → a stack of (function, whether it takes sinks), one for each active `attend_by`. Not
by thread: a learner may work in a thread while engines step, and autograd recomputes layers in threads of its own."""


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **named: Any
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it; families pass what they have (scaling, softcap …) by name.

    The mask is ignored: the active function knows which tokens belong together.
    """
    attend, takes_sinks = _active[id(module.config)][-1]
    sinks, scaling = named.get("s_aux"), named.get("scaling")
    if sinks is not None and not takes_sinks:
        raise NotImplementedError("attention sinks (s_aux) have no form here")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: Any = module.layer_idx
    window, softcap = named.get("sliding_window") or 0, named.get("softcap") or 0.0
    options = AttentionOptions(scale, window, softcap, sinks, named.get("dropout", 0.0))
    return attend(layer, query, key, value, options), None


@cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)


@contextmanager
def attend_by(attend: Attend, configs: list[Any], sinks: bool = False) -> Iterator[None]:
    """Inside, models with these configurations attend through `attend`; `sinks`: whether it takes attention sinks."""
    _register()
    before = [config._attn_implementation for config in configs]
    for config in configs:
        _active.setdefault(id(config), []).append((attend, sinks))
    try:
        for config in configs:
            config._attn_implementation = NAME
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
            if len(stack := _active[id(config)]) > 1:
                stack.pop()
            else:
                del _active[id(config)]


def over_tokens(attend: Attend) -> Attend:
    """Adapt `attend` over flat tokens [tokens, heads, dim] to a model that gets them as one row."""

    def call(layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return attend(layer, q, k, v, options)[None]

    return call
