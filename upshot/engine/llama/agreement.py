"""Checks that a leaner forward computes what the model itself computes; shared by engine and learner.

Both sides have a `select.py` that knows their forwards, runs a short text through them, and decides what happens if
none agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from upshot.engine.llama.attention import attend_by
from upshot.engine.llama.driver import training_mode
from upshot.engine.llama.shape import causal_lm, configs_of, odd_layers

FAILURES = (NotImplementedError, AttributeError, TypeError, ValueError, KeyError, RuntimeError, IndexError)
"""What a forward may raise on a model that it was not written for."""


def logits_gap(got: Tensor, expected: Tensor, dtype: torch.dtype, rough: bool = False) -> str | None:
    """None if the logits `got` agree with the model's own, `expected`; else by how much they differ.

    `rough`: a wider limit, for one block in 8 bits or with experts.
    """
    gap = float((got.float() - expected.float()).norm() / (expected.float().norm() + 1e-6))
    # Relative errors: random weights in bfloat16 differ from float32 by 5 %, a wrong layer by more than half. A product
    # in 8 bits is off by 4 %, and a block by little more.
    limit = 0.3 if rough else 1e-3 if dtype == torch.float32 else 0.2
    return None if gap <= limit else f"logits differ from the model's own forward by {gap:.2g} of their size"


def other_mixing(model: torch.nn.Module) -> str | None:
    """None if tokens influence each other through attention only; else what else mixes them.

    Other mixing (a convolution, a recurrent state, attention that transformers does not dispatch) would mix the tokens
    of neighbouring sequences, which are packed without padding, and its state is not in the KV pages. The test: if
    every token attends only to itself, earlier tokens must not change its logits, apart from rounding.
    """
    lm = causal_lm(model)
    if odd := odd_layers(lm):
        return odd
    device, vocab = lm.get_input_embeddings().weight.device, lm.get_input_embeddings().weight.shape[0]
    rows = torch.tensor([[(7 * i + 3) % vocab for i in range(8)], [(11 * i + 5) % vocab for i in range(8)]])
    rows[:, -1] = 3 % vocab

    def attend_to_itself(layer: int, q: Tensor, k: Tensor, v: Tensor, options: Any) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)

    quiet = training_mode(model.modules(), False)
    with torch.no_grad(), quiet, attend_by(attend_to_itself, configs_of(lm), sinks=True):
        one, other = (lm(input_ids=row[None].to(device), use_cache=False).logits[0, -1].float() for row in rows)
    gap = float((one - other).norm() / (one.norm() + 1e-6))
    # Experts compute tokens in groups that depend on the batch, which changes rounding a little.
    limit = 1e-3 if lm.get_input_embeddings().weight.dtype == torch.float32 else 0.05
    return None if gap <= limit else f"tokens see others outside attention (logits change by {gap:.2g} of their size)"


def plain_logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """The model's own logits [3, vocab] of the last three ids of the (last) row, on the CPU."""
    with training_mode(model.modules(), False):  # attention dropout follows its module's training mode
        lm = causal_lm(model)
        ids = torch.atleast_2d(ids).to(lm.get_input_embeddings().weight.device)
        return lm(input_ids=ids, use_cache=False).logits[-1, -3:].cpu()  # type: ignore[no-any-return]


@contextmanager
def block_alone(core: Any, index: int) -> Iterator[None]:
    """Inside, the model consists of embedding, the one block `index`, and head; other blocks return their input.

    Rounding errors grow through a deep model until the logits of the whole say nothing about whether two forwards
    agree. Each block by itself still does.
    """
    blocks = core.layers
    others = [block if at == index else SkippedBlock(block) for at, block in enumerate(blocks)]
    core.layers = torch.nn.ModuleList(others)
    try:
        yield
    finally:
        core.layers = blocks


class SkippedBlock(torch.nn.Module):
    """Stands in for a block and returns its input."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.attention_type = getattr(block, "attention_type", None)  # some families' forwards read it

    def forward(self, hidden: Tensor, *arguments: Any, **more: Any) -> Tensor:
        """Its input."""
        return hidden


@contextmanager
def busy_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Inside, adapters have random values that change the logits.

    New adapters add zeros or are copies of the original modules, so a driver that ignores them would seem to agree.
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
