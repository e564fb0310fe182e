"""A model and its learner's state, copied to the host: what a thread can write while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def snapshot(module: Any, tokenizer: Any, state: Mapping[str, Any], name: str) -> Callable[[Path], None]:
    """What writes weights and tokenizer as a Hugging Face folder, and `state` beside them, as they are now."""
    weights, kept = _weights(module), on_host(state)

    def write(folder: Path) -> None:
        from transformers.utils import logging

        logging.disable_progress_bar()
        module.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
        torch.save(kept, folder / name)

    return write


def on_host(value: Any) -> Any:
    """A copy in the host's memory of a tensor, or of the tensors in dictionaries, lists and tuples."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)


def _weights(module: Any) -> dict[str, Tensor]:
    """All weights by name: those that are trained copied, and tied ones still tied."""
    frozen = {p.data_ptr() for p in module.parameters() if not p.requires_grad}
    copies: dict[tuple[int, torch.Size], Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        place = tensor.data_ptr(), tensor.shape
        if place not in copies:
            copies[place] = tensor if tensor.data_ptr() in frozen else on_host(tensor)
        return copies[place]

    return {key: copied(tensor) for key, tensor in module.state_dict().items()}
