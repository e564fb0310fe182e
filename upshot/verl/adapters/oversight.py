"""Supervises verl's runner: a budget for its workers, a watchdog, the reason of its end, and helpers closed at the end.

verl's `run_ppo` creates a runner and waits for its `run`; `OverseenRunner` replaces the runner's class there.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from upshot.core.errors import UserError
from upshot.run.folder import METRICS, RunFolder
from upshot.verl.adapters.budget import DEATHS, describe_death, open_budget
from upshot.verl.adapters.checks import check_cluster
from upshot.verl.adapters.loop import recipe_here, recipe_path
from upshot.verl.budget import describe_loss
from upshot.verl.checks.watchdog import Patience, Watchdog, describe_demands
from upshot.verl.process import LOG

log = logging.getLogger(__name__)

LOOK_S, DEATHS_S = 1.0, 3.0
"""Seconds between two checks of the run, and of its workers: verl would wait for ever for a dead worker."""
WORKER = "AgentLoopWorker"
"""Part of the class names of actors that play conversations."""
CLOSE_S, HASTY_S = 20.0, 5.0
"""Seconds for workers to close their helpers, after a successful run and after a failed one."""


@dataclass(frozen=True)
class OverseenRunner:
    """A Ray runner class whose `run` is supervised from start to end."""

    runner: Any

    def options(self, **options: Any) -> OverseenRunner:
        """See Ray."""
        return OverseenRunner(self.runner.options(**options))

    def remote(self) -> SimpleNamespace:
        """The runner; `run.remote(config)` returns when the run has ended."""
        runner = self.runner.remote()
        run = SimpleNamespace(remote=lambda config: oversee(lambda: runner.run.remote(config), config))
        return SimpleNamespace(run=run)


def oversee(start: Callable[[], Any], config: Any) -> Any:
    """Start a run and wait for its end: its reference, or `UserError` if one of its processes has died.

    After SIGTERM the current step ends and is saved; if that takes too long, the sender of the signal kills us.
    """
    recipe, folder = recipe_here(), Path(recipe_path()).parent
    check_cluster(recipe, config, folder)
    budget = open_budget(recipe, folder)
    gone, ended, looked = budget.wait_for_ever.remote(), False, time.monotonic()
    say, patience = partial(print, flush=True), Patience.of(config)
    watchdog = Watchdog(folder / LOG, folder / METRICS, lambda: find_waits(budget), say, patience)
    signals: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    run = start()
    try:
        while True:
            if signals:
                budget.ask_to_stop.remote()
            done, _ = ray.wait([run, gone], num_returns=1, timeout=LOOK_S)
            if run in done:
                ended = True
                return run
            if done:
                try:
                    ray.get(gone)
                except RayActorError as error:
                    raise UserError(describe_loss(error)) from error
            if time.monotonic() - looked > DEATHS_S:
                stop_if_dead()
                looked = time.monotonic()
            watchdog.look()
    finally:
        signal.signal(signal.SIGTERM, before)
        _close(budget, RunFolder(folder), CLOSE_S if ended else HASTY_S)


def stop_if_dead() -> None:
    """`UserError` if an agent-loop worker of this job is gone."""
    from ray._private.state import actors

    job = ray.get_runtime_context().get_job_id()
    for actor in actors().values():
        if actor["State"] == "DEAD" and WORKER in actor["ActorClassName"] and actor["JobID"] == job:
            why = find_cause(actor["DeathCause"])
            raise UserError(describe_death(f"an agent-loop worker (pid {actor['Pid']})", why))


def find_cause(cause: Any) -> str:
    """Why an actor died, in Ray's words, which has a field for each kind of death (out of memory, lost node …)."""
    messages = [getattr(value, "error_message", "") or str(value) for _, value in cause.ListFields()]
    return "; ".join(filter(None, messages)) or "nothing of the cause"


def reason(error: Exception) -> tuple[str, int]:
    """Why a run failed, in one line, and its exit code: 2 for errors that the user can fix."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, UserError):
        return str(cause), 2
    print(str(error), flush=True)  # the whole of it is for the log
    if isinstance(cause, DEATHS):
        return describe_death("a process of verl's", cause), 1
    return f"verl failed: {type(cause).__name__}: {' '.join(str(cause).split())[-600:]}", 1


def find_waits(budget: Any) -> list[str]:
    """What a run waits for: the trainer's phase, and what Ray cannot place."""
    from ray._private.state import actors
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.util.placement_group import placement_group_table

    try:
        lines = list(ray.get(budget.describe.remote(), timeout=5))
    except RayError as error:
        lines = [f"the budget's actor does not answer ({type(error).__name__})"]
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    demands = status.resource_demands.ray_task_actor_demand
    requests = [(each.bundle, each.count) for demand in demands for each in demand.bundles_by_count]
    lines += describe_demands(list(placement_group_table().values()), requests)
    pending = [actor for actor in actors().values() if actor["State"] in ("PENDING_CREATION", "DEPENDENCIES_UNREADY")]
    lines += [f"actor {actor['Name'] or actor['ActorClassName']} is {actor['State']}" for actor in pending]
    free, whole = ray.available_resources(), ray.cluster_resources()
    resources = ", ".join(f"{free.get(name, 0):g} of {whole.get(name, 0):g} {name} free" for name in ("CPU", "GPU"))
    return [*lines, f"Ray has {resources}"]


def _close(budget: Any, folder: RunFolder, seconds: float) -> None:
    """Close the helpers of all workers, and record what they have spent."""
    try:
        left = ray.get(budget.close.remote(seconds), timeout=seconds + 5)
        folder.write_spent(ray.get(budget.spent.remote(), timeout=5))
    except RayError as error:
        log.warning("the helpers could not be closed: %s", str(error).splitlines()[0])
        return
    if left:
        log.warning("%d workers did not close their helpers within %.0f s: %s", len(left), seconds, "; ".join(left))
