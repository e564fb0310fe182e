"""Does a forward compute what the model computes? What engine and learner ask alike of the leaner forwards they choose.

Each side has its own `select.py`: which forwards there are, how a short text is put through them, what is done where
none agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from upshot.engine.llama.attention import attend_by
from upshot.engine.llama.driver import out_of_training
from upshot.engine.llama.shape import causal_lm, configs_of, odd_layers

FAILURES = (NotImplementedError, AttributeError, TypeError, ValueError, KeyError, RuntimeError, IndexError)
"""What a forward raises that meets a model it was not made for."""


def logits_gap(got: Tensor, expected: Tensor, dtype: torch.dtype, rough: bool = False) -> str | None:
    """None if logits of a model in `dtype` (`rough`: of one block, in 8 bits or of experts) agree with its own; else
    how far they are off."""
    gap = float((got.float() - expected.float()).norm() / (expected.float().norm() + 1e-6))
    # Random weights in bfloat16 are already 5 % from float32; a wrong layer is off by more than half. Each product in 8
    # bits is off by 4 %, and a block by little more.
    limit = 0.3 if rough else 1e-3 if dtype == torch.float32 else 0.2
    return None if gap <= limit else f"logits differ from the model's own forward by {gap:.2g} of their size"


def other_mixing(model: torch.nn.Module) -> str | None:
    """None if a model's tokens see each other in attention alone; else what changes if every token attends only to
    itself.

    What mixes tokens elsewhere (a convolution, a state that is carried on, attention of its own) would mix those of one
    sequence with its neighbour's where they lie end to end, and is not in the pages of keys and values. With every
    token attending to itself, others before it must not change it: rounding apart, whatever the dtype.
    """
    lm = causal_lm(model)
    if odd := odd_layers(lm):
        return odd
    device, vocab = lm.get_input_embeddings().weight.device, lm.get_input_embeddings().weight.shape[0]
    rows = torch.tensor([[(7 * i + 3) % vocab for i in range(8)], [(11 * i + 5) % vocab for i in range(8)]])
    rows[:, -1] = 3 % vocab

    def attend_to_itself(layer: int, q: Tensor, k: Tensor, v: Tensor, options: Any) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)

    with torch.no_grad(), out_of_training(model.modules()), attend_by(attend_to_itself, configs_of(lm), sinks=True):
        one, other = (lm(input_ids=row[None].to(device), use_cache=False).logits[0, -1].float() for row in rows)
    gap = float((one - other).norm() / (one.norm() + 1e-6))
    # Experts compute a token with others in the batch: a little of that is rounding.
    limit = 1e-3 if lm.get_input_embeddings().weight.dtype == torch.float32 else 0.05
    return None if gap <= limit else f"tokens see others outside attention (logits change by {gap:.2g} of their size)"


def plain_logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """The model's own logits of the last three ids of one row, or of the last row, on the CPU."""
    with out_of_training(model.modules()):  # attention dropout follows its module's own mode
        lm = causal_lm(model)
        ids = torch.atleast_2d(ids).to(lm.get_input_embeddings().weight.device)
        return lm(input_ids=ids, use_cache=False).logits[-1, -3:].cpu()  # type: ignore[no-any-return]


@contextmanager
def block_alone(core: Any, index: int) -> Iterator[None]:
    """Inside: one of a model's blocks is between embedding and head, and the others pass on what they are given.

    Rounding grows through a deep model until nothing is left of what is compared: the whole then says nothing about
    whether a forward does what the model does, each block does.
    """
    blocks = core.layers
    others = [block if at == index else SkippedBlock(block) for at, block in enumerate(blocks)]
    core.layers = torch.nn.ModuleList(others)
    try:
        yield
    finally:
        core.layers = blocks


class SkippedBlock(torch.nn.Module):
    """A block's place, where nothing is computed."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.attention_type = getattr(block, "attention_type", None)  # some families' forwards ask their blocks for it

    def forward(self, hidden: Tensor, *arguments: Any, **more: Any) -> Tensor:
        """What came."""
        return hidden


@contextmanager
def busy_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Inside: adapters have values that change the logits.

    New ones add zeros or are copies of what they stand for, so a driver that leaves them out would seem to agree.
    """
    noise = torch.Generator().manual_seed(0)
    wrapped = hasattr(model, "peft_config")
    weights = [w for w in model.parameters() if w.requires_grad or not w.any()] if wrapped else []
    before = [w.data.clone() for w in weights]
    try:
        for weight in weights:
            scale = float(weight.data.float().square().mean().sqrt()) or 0.3
            weight.data.add_((torch.randn(weight.shape, generator=noise) * scale).to(weight.device, weight.dtype))
        yield
    finally:
        for weight, values in zip(weights, before, strict=True):
            weight.data.copy_(values)
