"""Chooses the driver of a model: the leanest one whose logits agree with the model's own. Both runners call it.

A driver prefills a short prompt in two chunks and decodes two ids; its logits are compared with the model's own
forward, in exact mode bit for bit with the learner's exact forward. A driver that calls the model itself also needs a
model whose tokens influence each other through attention only, as other state is not in the KV pages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upshot.core.errors import UserError
from upshot.engine.cpu.runner import DecodeStep, PrefillStep
from upshot.engine.cpu.store import Store
from upshot.engine.exact.forward import ExactForward
from upshot.engine.exact.step import ExactDriver, ExactStep
from upshot.engine.llama.agreement import FAILURES, block_alone, busy_adapters, logits_gap, other_mixing, plain_logits
from upshot.engine.llama.attention import AttentionStep
from upshot.engine.llama.block import family_of, is_block_family
from upshot.engine.llama.driver import BlockDriver, Driver, ModuleDriver
from upshot.engine.llama.eight_bit import check_eight_bit_cache, check_eight_bits
from upshot.engine.llama.shape import Shape, causal_lm
from upshot.engine.scheduler import Chunk
from upshot.engine.sequence import Rules, Sequence

IDS = 12
"""Ids of the prompt on which drivers are compared."""


def drivers_of(model: torch.nn.Module, shape: Shape, settings: Any, kernels: bool) -> list[Callable[[], Driver]]:
    """Constructors of drivers that may suit the model, the leanest first; `kernels`: with the Triton one."""
    lean, narrow = settings.lean and is_block_family(model), settings.weights == "fp8"
    if narrow:
        check_eight_bits(family_of(model), shape, settings, lean and kernels)
    if settings.kv == "fp8":
        check_eight_bit_cache(model, shape, settings, lean and kernels)
    if settings.exact:
        return [lambda: ExactDriver(model, shape, kernels)]
    makers: list[Callable[[], Driver]] = [lambda: ModuleDriver(model, shape)]
    if not lean:
        return makers
    makers.insert(0, lambda: BlockDriver(model, shape, settings.merge))
    if kernels:
        from upshot.engine.llama.fused import FusedDriver

        makers.insert(0, lambda: FusedDriver(model, shape, settings.merge, narrow, settings.kv == "fp8"))
        if narrow or settings.kv == "fp8":
            makers = makers[:1]  # no other driver supports 8 bits
    return makers


def select_driver(
    model: torch.nn.Module,
    shape: Shape,
    settings: Any,
    kernels: bool,
    check: Callable[[Driver], str | None] | None = None,
) -> Driver:
    """The first driver for which `check` (default: `disagreement`) returns None; `UserError` if there is none."""
    check = check or partial(disagreement, model)
    makers = drivers_of(model, shape, settings, kernels)
    reasons: list[str] = []
    for make in makers:
        driver = make()
        reason = check(driver) if settings.check else None
        if reason is None:
            return driver
        driver.release()
        reasons.append(f"{type(driver).__name__}: {reason}")
        if len(reasons) < len(makers):
            warnings.warn(f"the engine falls back to a slower driver: {reasons[-1]}", stacklevel=2)
    raise UserError(f"the engine cannot run {type(causal_lm(model)).__name__} ({'; '.join(reasons)})")


def disagreement(
    model: torch.nn.Module, driver: Driver, drive: Callable[[Driver, list[int]], Tensor] | None = None
) -> str | None:
    """None if the driver's logits agree with the model's; else what differs.

    `drive` computes the driver's logits of the last three ids; default: `drive_on_cpu`.
    """
    ids = [(7 * i + 3) % driver.shape.vocab for i in range(IDS)]
    try:
        with torch.inference_mode():
            return _compare(model, driver, partial(drive or drive_on_cpu, driver, ids), ids)
    except FAILURES as error:
        return f"{type(error).__name__}: {error}"


def _compare(model: torch.nn.Module, driver: Driver, drive: Callable[[], Tensor], ids: list[int]) -> str | None:
    if isinstance(driver, ModuleDriver) and (reason := other_mixing(model)):
        return reason
    if driver.rough and driver.by_block:
        return _gap_of_blocks(model, driver, drive, ids)
    expected, got = _both(model, driver, drive, ids)
    if isinstance(driver, ExactDriver):
        wrong = int((got != expected).sum())
        return f"{wrong} of {got.numel()} logits are not bitwise the learner's" if wrong else None
    reason = _gap(got, expected, driver)
    # In 16 bits rounding of large numbers (biases of keys) may change the whole; then compare block by block.
    if reason and driver.by_block and driver.shape.dtype != torch.float32:
        return _gap_of_blocks(model, driver, drive, ids)
    return reason


def _gap(got: Tensor, expected: Tensor, driver: Driver) -> str | None:
    reason = logits_gap(got, expected, driver.shape.dtype, driver.rough)
    config = driver.lm.config.get_text_config()
    capped = getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa"
    hint = "; sdpa leaves out this model's soft cap: load it with attn_implementation='eager'" if capped else ""
    return reason and reason + hint


def _gap_of_blocks(model: torch.nn.Module, driver: Any, drive: Callable[[], Tensor], ids: list[int]) -> str | None:
    """None if every block by itself, between embedding and head, agrees with the model's own; else what differs."""
    layers = driver.layers
    try:
        with busy_adapters(model):
            driver.refresh()
            layers = driver.layers
            for index, layer in enumerate(layers):
                driver.layers = [layer]
                with block_alone(driver.core, index):
                    reason = _gap(drive(), plain_logits(model, torch.tensor(ids)), driver)
                if reason:
                    return f"block {index}: {reason}"
    finally:
        driver.layers = layers
        driver.refresh()
    return None


def _both(model: torch.nn.Module, driver: Any, drive: Callable[[], Tensor], ids: list[int]) -> tuple[Tensor, Tensor]:
    """The expected logits and the driver's, with random adapters; adapters are not merged during the former."""
    if not driver.has_adapters:
        with busy_adapters(model):
            return expected_logits(model, driver, ids), drive()
    # A driver that ignores adapters because they add nothing would need a copy of all weights if they had values.
    busy = nullcontext() if driver.weights.shares else busy_adapters(model)
    driver.release()
    try:
        with busy:
            expected = expected_logits(model, driver, ids)
            driver.take()
            try:
                return expected, drive()
            finally:
                driver.release()
    finally:
        driver.take()


def expected_logits(model: torch.nn.Module, driver: Driver, ids: list[int]) -> Tensor:
    """The logits that a driver must give for the last ids: the model's own, or in exact mode the exact ones."""
    plain = plain_logits(model, torch.tensor(ids))
    if not isinstance(driver, ExactDriver):
        return plain
    forward = ExactForward(driver.mode.kernels)
    # As the third of three rows, so that a result that depends on its place in the batch differs.
    rows = torch.tensor([ids[5:] + ids[:5], ids[::-1], ids])
    with forward.attention(model), forward.operations():
        exact = plain_logits(model, rows)
    reason = _gap(exact, plain, driver)
    if reason is not None:
        raise UserError(f"exact mode cannot run {type(causal_lm(model)).__name__}: in exact operations its {reason}")
    return exact


def drive_on_cpu(driver: Driver, ids: list[int]) -> Tensor:
    """Logits [3, vocab] of the last three ids: two prefill chunks, then two decode steps."""
    shape = driver.shape
    seq = Sequence(list(ids), Rules(), pages=list(range(1, 5)))
    store = Store(shape, n_pages=5, page_size=4)
    rows = []
    for start, stop in pairwise([0, 5, IDS - 2, IDS - 1, IDS]):
        step: AttentionStep
        if isinstance(driver, ExactDriver):
            step = ExactStep(store, [(seq, start, stop)])
        elif stop - start > 1:
            step = PrefillStep(store, [Chunk(seq, start, stop, [])])
        else:
            step = DecodeStep(store, None, [seq], np.array([start]))
        last = torch.tensor([stop - start - 1])
        rows.append(driver.logits(torch.tensor(ids[start:stop]), torch.arange(start, stop), step, last))
    return torch.cat(rows[1:])
