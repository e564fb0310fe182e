"""The budget of a run as a named Ray actor: created by the driver, called by the workers, gone with the job.

It also knows what the trainer is doing, for messages about a run that does not move.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError

from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.run.folder import RunFolder
from upshot.verl.budget import BudgetClient, BudgetLedger, describe_loss

NAME = "upshot-budget"
"""The actor's name in the namespace of the job."""
DEATHS = (RayActorError, OutOfMemoryError)
"""Raised by a call to an actor that is gone; Ray has a separate error for an actor that ran out of memory."""
CLOSE_S = 20.0
"""Seconds that workers have to close their helpers."""


@ray.remote(num_cpus=0, max_restarts=0)
class BudgetActor(BudgetLedger):
    """Keeps the ledger of a run."""

    def __init__(self, max_calls: int | None, before: Mapping[str, float]) -> None:
        super().__init__(max_calls, before)
        self._phase = ("the start", time.monotonic())
        self._stopping = False

    async def ask_to_stop(self) -> None:
        """Ask the run to end after the current step."""
        self._stopping = True

    async def is_stopping(self) -> bool:
        """Whether the run was asked to end."""
        return self._stopping

    async def set_phase(self, name: str) -> None:
        """Note what the trainer is doing now."""
        self._phase = (name, time.monotonic())

    async def describe(self) -> list[str]:
        """The state of the run, as lines of text."""
        name, since = self._phase
        spent = ", ".join(f"{value:g} {what}" for what, value in self.spent().items())
        last = f"last phase: {name}, for {time.monotonic() - since:.0f} s"
        return [last, f"{len(self.open)} workers, spent: {spent}"]

    async def wait_for_ever(self) -> None:
        """Never returns: whoever awaits it notices the actor's death."""
        await asyncio.Event().wait()

    async def close(self, seconds: float = CLOSE_S) -> list[str]:
        """Let every worker close its helpers; returns the workers that did not do so in time."""
        self.closing = True
        end = time.monotonic() + seconds
        while self.open and time.monotonic() < end:
            await asyncio.sleep(0.05)
        return sorted(self.open)


def budget_client() -> BudgetClient:
    """A worker's connection to the actor; the results of its methods can be awaited."""
    actor = find_budget()
    return SimpleNamespace(take_call=actor.take_call.remote, report=actor.report.remote)  # type: ignore[return-value]


def open_budget(recipe: Recipe, folder: Path) -> Any:
    """Create the actor of this job, on the driver's node; its handle keeps it alive."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), False)
    actor = BudgetActor.options(name=NAME, scheduling_strategy=here, max_concurrency=10_000)  # type: ignore[attr-defined]
    return actor.remote(recipe.budget.max_calls, RunFolder(folder).spent())


def find_budget() -> Any:
    """The actor of this job."""
    try:
        return ray.get_actor(NAME)
    except ValueError as error:
        raise UserError(f"{describe_loss(error)}; is this run started by `upshot train --engine verl`?") from error


def describe_death(what: str, why: BaseException | str) -> str:
    """The message about an actor whose end stops the run."""
    message = " ".join(line.strip() for line in str(why).splitlines() if line.strip())
    return f"{what} died and the run is stopped; continue it with --resume. Ray says: {message[:600]}"
