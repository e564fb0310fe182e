"""Which driver computes a model's logits: the leanest one that computes what the model computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from upshot.core.errors import UserError
from upshot.engine.llama.blocks import BlockDriver, is_block_family
from upshot.engine.llama.driver import Driver, ModuleDriver, Shape, causal_lm


def drivers_of(model: torch.nn.Module, shape: Shape, settings: Any, kernels: bool) -> list[Callable[[], Driver]]:
    """Drivers that may suit the model, the leanest first; `kernels`: those that bring the GPU's kernels, too.

    The fused block rotates halves of a head, whose width must be a power of two.
    """
    if settings.exact:
        from upshot.engine.exact.step import ExactDriver

        return [lambda: ExactDriver(model, shape, kernels)]
    makers: list[Callable[[], Driver]] = [lambda: ModuleDriver(model, shape)]
    if not settings.lean or not is_block_family(model):
        return makers
    makers.insert(0, lambda: BlockDriver(model, shape, settings.merge))
    if kernels and shape.head_dim.bit_count() == 1:
        from upshot.engine.llama.fused import FusedDriver

        makers.insert(0, lambda: FusedDriver(model, shape, settings.merge))
    return makers


def checked_driver(
    model: torch.nn.Module, makers: list[Callable[[], Driver]], disagreement: Callable[[Driver], str | None] | None
) -> Driver:
    """The first driver with no `disagreement` with the model's own forward; `UserError` if every one has."""
    reasons: list[str] = []
    for make in makers:
        driver = make()
        reason = disagreement(driver) if disagreement is not None else None
        if reason is None:
            return driver
        if isinstance(driver, BlockDriver):
            driver.release()
        reasons.append(f"{type(driver).__name__}: {reason}")
        if len(reasons) < len(makers):
            warnings.warn(f"the engine falls back to a slower driver: {reasons[-1]}", stacklevel=2)
    raise UserError(f"the engine cannot drive {type(causal_lm(model)).__name__} ({'; '.join(reasons)})")
