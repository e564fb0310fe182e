"""Does a forward compute what the model computes? What engine and learner ask alike of the leaner forwards they choose.

Each side has its own `select.py`: which forwards there are, how a short text is put through them, what is done where
none agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from upshot.engine.llama.driver import causal_lm, out_of_training

FAILURES = (NotImplementedError, AttributeError, TypeError, ValueError, KeyError, RuntimeError, IndexError)
"""What a forward raises that meets a model it was not made for."""


def logits_gap(got: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """None if logits of a model in `dtype` agree with its own; else how far they are off."""
    gap = float((got.float() - expected.float()).norm() / (expected.float().norm() + 1e-6))
    # Random weights in bfloat16 are already 5 % from float32; a wrong layer is off by more than half.
    limit = 1e-3 if dtype == torch.float32 else 0.2
    return None if gap <= limit else f"logits differ from the model's own forward by {gap:.2g} of their size"


def plain_logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """The model's own logits of the last three ids of one row, or of the last row, on the CPU."""
    with out_of_training(model.modules()):  # attention dropout follows its module's own mode
        lm = causal_lm(model)
        ids = torch.atleast_2d(ids).to(lm.get_input_embeddings().weight.device)
        return lm(input_ids=ids, use_cache=False).logits[-1, -3:].cpu()  # type: ignore[no-any-return]


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
