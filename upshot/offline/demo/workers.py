"""Two processes in which a demonstration trains and evaluates in parallel, and a line that shows the time left.

Rounding of sums depends on the number of threads, so it is fixed: a job that runs alone has two threads, parallel jobs
have one each. So the table of a demonstration does not depend on the number of cores.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from upshot.core.files import read_jsonl
from upshot.core.process import die_with_parent
from upshot.core.threads import cores
from upshot.models.local import import_frameworks
from upshot.run.console import duration
from upshot.run.folder import METRICS

Result = TypeVar("Result")
THREADS = "OMP_NUM_THREADS"
Steps = Sequence[tuple[Path, int]]
"""Run folders, and how many lines their metrics will have."""
PRINT_EVERY_S = 10.0
"""How often the line is printed where it cannot be redrawn in place."""


@dataclass
class Progress:
    """The progress of a demonstration, as a share of its time, and the line that shows it."""

    quiet: bool
    began: float = field(default_factory=time.monotonic)
    done: float = 0.0
    """The share of the stages that have ended."""
    printed: float = 0.0
    line: str = ""
    """What was printed last."""

    def show(self, name: str, share: float, finished: float, detail: str) -> None:
        """Show the progress while a stage that takes the share `share` of the time is `finished` to this part."""
        reached, elapsed = self.done + share * finished, time.monotonic() - self.began
        left = f", about {duration(elapsed * (1 - reached) / reached)} left" if reached > 0.03 else ""
        line = f"   {name}: {detail}{left}"
        if self.quiet:
            return
        if sys.stdout.isatty():
            print(f"\r{line}\x1b[K", end="\n" if finished == 1 else "", flush=True)
        elif line != self.line and (finished == 1 or time.monotonic() - self.printed >= PRINT_EVERY_S):
            print(line, flush=True)
            self.line, self.printed = line, time.monotonic()


class Workers:
    """Runs picklable jobs without arguments: functions of a module, and partials of them."""

    def __init__(self, pool: Executor | None, progress: Progress) -> None:
        self._pool, self._progress = pool, progress

    @property
    def here(self) -> bool:
        """Whether jobs run in this process, one after another, because there is a single core."""
        return self._pool is None

    def run(self, name: str, share: float, jobs: Sequence[Callable[[], Result]], steps: Steps = ()) -> list[Result]:
        """The results of the jobs, started in this order; meanwhile show the progress of the runs in `steps`."""
        threads = 2 if len(jobs) == 1 else 1
        if self._pool is None:
            return [_with_threads(threads, job) for job in jobs]
        futures = [self._pool.submit(_with_threads, threads, job) for job in jobs]
        while (state := wait(futures, timeout=0.5)).not_done:
            for future in state.done:
                future.result()  # raises what failed
            self._progress.show(name, share, *how_far(futures, steps))
        results = [future.result() for future in futures]
        self._progress.show(name, share, 1.0, how_far(futures, steps)[1])
        self._progress.done += share
        return results


def how_far(futures: Sequence[Future[Any]], steps: Steps) -> tuple[float, str]:
    """The finished part, below 1, and a text: by the steps of runs, or else by the jobs that have ended."""
    if not steps:
        ended = sum(future.done() for future in futures)
        return min(ended / len(futures), 0.99), f"{ended} of {len(futures)}"
    lines = [read_jsonl(folder / METRICS) for folder, _ in steps]
    reached = min(len(metrics) / max(1, total) for metrics, (_, total) in zip(lines, steps, strict=True))
    detail = f"step {' and '.join(str(len(metrics)) for metrics in lines)} of {max(total for _, total in steps)}"
    rewards = [metrics[-1]["reward/mean"] for metrics in lines if metrics and "reward/mean" in metrics[-1]]
    if rewards:
        detail += f", reward {' and '.join(f'{reward:.2f}' for reward in rewards)}"
    return min(reached, 0.99), detail


@contextmanager
def start_workers(progress: Progress) -> Iterator[Workers]:
    """Two workers that import PyTorch while they wait for a job; none where there is a single core."""
    if cores() < 2:
        yield Workers(None, progress)
        return
    spawn = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
    with ProcessPoolExecutor(2, spawn, _import_training) as pool:
        pool.submit(_import_training)
        yield Workers(pool, progress)


def _import_training() -> None:
    """Import what a job needs: the second worker does this while it waits for the warm start."""
    die_with_parent()  # a killed demonstration leaves no training behind
    import_frameworks()
    from transformers import LlamaForCausalLM  # noqa: F401

    import upshot.run.run  # noqa: F401


def _with_threads(threads: int, job: Callable[[], Result]) -> Result:
    import torch

    before, stated = torch.get_num_threads(), os.environ.get(THREADS)
    torch.set_num_threads(threads)
    os.environ[THREADS] = str(threads)  # the run folder records this variable
    try:
        return job()
    finally:
        torch.set_num_threads(before)
        os.environ.pop(THREADS)
        if stated is not None:
            os.environ[THREADS] = stated
