"""The ledger as a named Ray actor: made by the driver, reported to by the agent-loop workers, gone with the job."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

import ray

from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.run.folder import RunFolder
from upshot.verl.budget.ledger import Ledger, WorkerGrant, WorkerReport, describe_loads
from upshot.verl.budget.quota import Tell, describe_loss

log = logging.getLogger(__name__)

NAME = "upshot-ledger"
"""Within the namespace of the job."""
LATE_S = 3.0
"""Seconds without a report after which a worker is asked for by Ray."""
WRITE_S = 2.0
"""Seconds between two writings of what is spent."""
CLOSE_S = 20.0
"""Seconds that workers have to close their helpers."""


@ray.remote(num_cpus=0, max_restarts=0)
class LedgerActor:
    """Keeps the books, watches for workers that die, and writes what is spent into the run folder."""

    def __init__(self, max_calls: int | None, folder: str) -> None:
        self.folder = RunFolder(Path(folder))
        self.ledger = Ledger(max_calls, self.folder.spent())
        self._ids: dict[str, str] = {}
        self._heard: dict[str, float] = {}
        self._asked: set[str] = set()
        self._phase = ("the start", time.monotonic())
        self._why = ""
        self._stop = asyncio.Event()
        self._chores: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to look after the workers; here and not before is the actor's event loop."""
        self._chores = asyncio.create_task(self._look_after())

    async def join(self, worker: str, actor_id: str) -> None:
        """A worker that will report; by its id Ray tells whether it lives (with its handle would come all of verl)."""
        self._ids[worker], self._heard[worker] = actor_id, time.monotonic()

    async def report(self, said: WorkerReport) -> WorkerGrant:
        """See `Ledger`."""
        self._heard[said.worker] = time.monotonic()
        grant = self.ledger.report(said)
        if said.last:
            self._forget(said.worker)
        return grant

    async def stop(self, why: str) -> None:
        """A worker met what the user must mend: the run ends with these words."""
        self._why = self._why or why
        self._stop.set()

    async def stopped(self) -> str:
        """Why the run must end, as soon as that is known."""
        await self._stop.wait()
        return self._why

    async def phase(self, name: str) -> None:
        """What the trainer does now."""
        self._phase = (name, time.monotonic())

    async def view(self) -> list[str]:
        """How the run stands, for who wonders why nothing happens."""
        name, since = self._phase
        workers = len(self.ledger.workers)
        spent = ", ".join(f"{value:g} {what}" for what, value in self.ledger.spent().items())
        lines = [f"last phase: {name}, for {time.monotonic() - since:.0f} s", f"{workers} workers, spent: {spent}"]
        told = describe_loads(self.ledger.loads())
        return [*lines, *([f"endpoints: {told}"] if told else [])]

    async def close(self, seconds: float = CLOSE_S) -> list[str]:
        """Have every worker close its helpers; those that did not in time."""
        self.ledger.closing = True
        end = time.monotonic() + seconds
        while self.ledger.workers and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self._write()
        return list(self.ledger.workers)

    async def _look_after(self) -> None:
        written = 0.0
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            for worker, heard in list(self._heard.items()):
                if now - heard > LATE_S and worker in self._ids and worker not in self._asked:
                    self._asked.add(worker)
                    asyncio.get_running_loop().create_task(self._ask(worker))
            if now - written > WRITE_S:
                self._write()
                written = now

    async def _ask(self, worker: str) -> None:
        """Ray's word on a worker that is silent: it may be busy."""
        from ray._private.state import actors

        try:
            found = await asyncio.to_thread(actors, self._ids[worker])
            if found.get("State") != "DEAD":
                return
            self.ledger.bury(worker)
            self._forget(worker)
            if not self.ledger.closing:  # verl would wait for ever for what it played
                why = found["DeathCause"].actor_died_error_context.error_message
                await self.stop(describe_death(f"an agent-loop worker ({worker})", why))
        finally:
            self._asked.discard(worker)

    def _forget(self, worker: str) -> None:
        self._ids.pop(worker, None)
        self._heard.pop(worker, None)

    def _write(self) -> None:
        try:
            self.folder.write_spent(self.ledger.spent())
        except OSError as error:
            log.warning("what is spent could not be written: %s", error)


def describe_death(what: str, why: BaseException | str) -> str:
    """What is said of an actor whose end stops the run."""
    told = " ".join(line.strip() for line in str(why).splitlines() if line.strip())
    return f"{what} died; the run is stopped, go on with it by --resume. Ray says: {told[:600]}"


def open_ledger(recipe: Recipe, folder: Path) -> Any:
    """Make the ledger of this job, on the driver's node; its handle keeps it alive."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), False)
    actor = LedgerActor.options(name=NAME, scheduling_strategy=here, max_concurrency=10_000)  # type: ignore[attr-defined]
    ledger = actor.remote(recipe.budget.max_calls, str(folder))
    ray.get(ledger.open.remote())
    return ledger


def find_ledger() -> Any:
    """The ledger of this job."""
    try:
        return ray.get_actor(NAME)
    except ValueError as error:
        raise UserError(f"{describe_loss(error)}; is this run started by `upshot train --engine verl`?") from error


def make_teller(name: str) -> Tell:
    """How the worker of this process reports; it joins the ledger under a name."""
    ledger = find_ledger()
    ledger.join.remote(name, ray.get_runtime_context().get_actor_id())

    async def tell(report: WorkerReport) -> WorkerGrant:
        grant: WorkerGrant = await ledger.report.remote(report)
        return grant

    return tell


def name_here() -> str:
    """A worker's name."""
    return f"pid {os.getpid()} on {os.uname().nodename}"
