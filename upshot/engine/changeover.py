"""From eager decode steps to compiled ones, between two steps of a running engine, and back if need be."""

from __future__ import annotations

from typing import Any

import torch

from upshot.engine.blocks import BlockDriver
from upshot.engine.compiled import CompiledDriver, Compiler
from upshot.engine.cuda_steps import CudaStep
from upshot.engine.driver import Driver, ModuleDriver
from upshot.engine.kernels.decode import decode_attention


def compiler_for(driver: Driver, settings: Any) -> Compiler | None:
    """Who compiles the driver's decode steps; None for drivers that bring their own kernels."""
    return Compiler(driver) if settings.compile and type(driver) in (ModuleDriver, BlockDriver) else None


def change_over(runner: Any) -> None:
    """Use the compiled step from now on, if it is there and computes what the eager one computes."""
    from upshot.engine.probe import compare

    driver = runner.compiler.ready()
    if driver is None:
        return
    try:
        reason = compare(trial(runner, driver), trial(runner, driver.inner), driver)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        runner.compiler.fail(f"the compiled step is not the model's: {reason}")
        return
    _use(runner, driver)


def change_back(runner: Any, reason: str) -> None:
    """Use eager steps again, and say why."""
    if isinstance(runner.driver, CompiledDriver):
        _use(runner, runner.driver.inner)
        runner.compiler.fail(reason)


def keep_true(runner: Any) -> None:
    """The weights changed: a step that was traced from other modules or adapters is dropped and traced again."""
    if isinstance(runner.driver, CompiledDriver) and runner.driver.stale():
        _use(runner, runner.driver.inner)
        runner.compiler = Compiler(runner.driver)


def _use(runner: Any, driver: Driver) -> None:
    if runner.graphed is runner.driver:
        runner.graphed = driver
    runner.driver = driver
    if runner.on_gpu:
        torch.cuda.synchronize()  # a graph is not thrown away while it runs
    runner.graphs.clear()  # captured again, each when it is next used
    if not runner.prompt_graphs:
        runner.pool = None  # nobody holds it any more: a capture into it would fail


def trial(runner: Any, driver: Driver) -> torch.Tensor:
    """Logits of a few ids in the page nobody reads: rows that see each other, as a prompt would."""
    device, size = runner.shape.device, runner.page_size
    positions = torch.arange(max(2, min(size, 16)), device=device) % size
    ids = (7 * positions + 3) % runner.shape.vocab
    slots = torch.full_like(positions, runner.slots.count, dtype=torch.int32)
    lengths = (positions + 1).int()

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float
    ) -> torch.Tensor:
        return decode_attention(q, k, v, runner.cache.table, slots, lengths, scale, 1, None, window, softcap)

    step = CudaStep(runner.cache, runner.shape.heads, positions, positions, attend)
    return driver.logits(ids, positions, step, None).cpu()


def counts(runner: Any) -> dict[str, float]:
    """For `Engine.stats`: numbers of rows with a compiled step, whether one is under way, and the seconds it took."""
    compiler = getattr(runner, "compiler", None)
    if compiler is None:
        return {}
    used = isinstance(runner.driver, CompiledDriver)
    return {
        "compiled_buckets": len({rows for rows, _, _ in runner.graphs if rows > 1}) if used else 0,
        "compile_pending": int(compiler.pending),
        "compile_seconds": compiler.seconds,
    }
