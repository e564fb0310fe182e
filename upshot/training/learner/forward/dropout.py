"""A forward that trains without dropout: layers, and what attention draws by itself from `self.training`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_dropout(module: Any) -> Iterator[None]:
    """Evaluation mode for forward and backward, in which gradient checkpointing still works.

    transformers checkpoints a layer only while that layer is in training mode. So such a layer is, but only until its
    own forward begins (and begins again, in the backward).
    """
    module.eval()
    layers = [layer for layer in module.modules() if vars(layer).get("gradient_checkpointing")]
    functions = [layer._gradient_checkpointing_func for layer in layers]
    try:
        for layer, function in zip(layers, functions, strict=True):
            layer.training = True
            layer._gradient_checkpointing_func = _calm_layer(layer, function)
        yield
    finally:
        for layer, function in zip(layers, functions, strict=True):
            layer._gradient_checkpointing_func = function
        module.train()


def _calm_layer(layer: Any, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def call(forward: Callable[..., Any], *args: Any) -> Any:
        def calm(*inner: Any) -> Any:
            layer.training = False
            try:
                return forward(*inner)
            finally:
                layer.training = True

        return checkpoint(calm, *args)

    return call
