"""One run from recipe to checkpoint: the phases, one after another, and where they stand.

`RunServices` opens the helpers of the run and keeps their counts. The model and what is made of it:
`training/bundle.py`. Output, checkpoints among it: `writer.py`. Signals: `signals.py`.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshot.config.method import method_of
from upshot.config.phases import phase_config, phases_of
from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.conversation import derive_seed
from upshot.core.errors import UserError, reason_of
from upshot.core.files import write_json
from upshot.core.helper import Helper
from upshot.core.time_limit import call_seconds
from upshot.models.connect import share_endpoints
from upshot.rollout.play import RolloutContext
from upshot.rollout.reply import Rollout
from upshot.rollout.services import Services, build_context, build_services
from upshot.run import checks
from upshot.run.checkpoints import Checkpoint
from upshot.run.console import Reporter
from upshot.run.folder import RunFolder
from upshot.run.policy_server import serve_policy
from upshot.run.signals import exit_as_signalled, run_until_terminated
from upshot.run.trackers import make_trackers
from upshot.run.writer import Logs, Saver, Writer
from upshot.serving.servers.state import lease
from upshot.serving.swap.pool import ModelPool
from upshot.tasks.base import Task, tasks
from upshot.training.bundle import PolicyBundle, configure_helpers
from upshot.training.learner.distributed.ranks import ALONE, Ranks, add_counts
from upshot.training.learner.learner import Learner, all_finite
from upshot.training.metrics.alarms import bad_step
from upshot.training.metrics.best import BestMark
from upshot.training.setup import seed_torch

COUNTERS = "counters.json"
"""In a checkpoint: what the helpers' counters were."""


@dataclass
class PhaseState:
    """What there is to save of the phase under way."""

    learner: Learner
    config: TrainConfig
    updates: int
    """Optimizer steps of the learner when the last line was written."""
    bad_steps: int = 0
    """Steps in a row that ended without a finite loss and gradient."""

    @property
    def whole(self) -> bool:
        """Whether the learner stands at the end of a good step, not within an update."""
        return self.learner.steps == self.updates and not self.bad_steps


class RunServices:
    """Opens the helpers of a run and keeps their counts, over all ranks and resumes."""

    def __init__(self, recipe: Recipe, folder: RunFolder, ranks: Ranks) -> None:
        self.recipe, self.folder, self.ranks = recipe, folder, ranks
        self.counters: dict[str, Any] = {}
        """The helpers' counters after the last finished step; an unfinished step is played again, and counted then."""
        self._open: tuple[Services, PolicyBundle] | None = None
        self._helpers: list[Helper] = []
        self._summed: dict[str, Any] = {}
        """The counters when the ranks' were last added up."""
        self._counted: tuple[Logs, dict[str, Any]] = {}, {}
        """Of the step under way: numbers for its line, and the counters behind them."""

    @asynccontextmanager
    async def open(
        self, policy: PolicyBundle, resumed_from: Path | None
    ) -> AsyncIterator[tuple[Services, RolloutContext]]:
        """Helper models, user and metrics, started, with the context they play in; closed at the end."""
        layout = policy.memory.layout
        policy.pool = None if layout is None else ModelPool(layout, policy.module.device)
        policy.sampler.play_ahead(self.recipe.train.async_steps)
        recipe = configure_helpers(self.recipe, policy.memory)
        services = build_services(recipe, policy.task, policy.sampler, policy.tokenizer, policy.renderer, policy.pool)
        share_endpoints(services.models.values(), self.ranks.size)
        self._open = services, policy
        if spent := self.folder.spent():
            services.budget.restore(spent)
        self.ranks.share(services.budget)
        services.restore(self.counters)
        self._summed = services.counters()
        self._helpers = [helper for _, helper in services.helpers()]
        if resumed_from is not None:
            policy.sampler.load_copies(resumed_from)
        try:
            await policy.sampler.start()
            await services.start()
            yield services, build_context(self.recipe, services, policy.speaker())
        finally:
            self._open = None
            await services.aclose()
            if policy.pool is not None:
                await policy.pool.aclose()
                policy.pool = None
            await policy.sampler.disconnect()
            self.folder.write_spent(services.budget.state())

    async def pause(self) -> None:
        """Called when the current step is played: what its helpers have counted goes into its line, and engine and
        helpers free memory for the learner where the memory plan says so."""
        if self._open is None:
            return
        services, policy = self._open
        if self.ranks.size > 1:
            self._summed = add_counts(self._summed, self.ranks.all_gather_object("count", services.counters()))
            services.restore(self._summed)
        if any(helper.has_counted for helper in self._helpers):
            self._counted = services.stats(), services.counters()
        if policy.pool is not None and policy.memory.setting.helpers == "leave":
            policy.pool.rest()
        await policy.sampler.rest(policy.memory.setting.park)

    def finish_step(self) -> Logs:
        """What a finished step's line says of the helpers; their counters are from now on those of the run."""
        if self._open is None:
            return {}
        services, policy = self._open
        stats, self.counters = self._counted
        if services.models:  # nobody else costs anything
            self.folder.write_spent(services.budget.state())
        times = policy.pool.take_times() if policy.pool is not None else {}
        if policy.sampler.sync_seconds is not None:
            times["time/sync"], policy.sampler.sync_seconds = policy.sampler.sync_seconds, 0.0
        return {**stats, "time/dollars": services.budget.dollars, **times}


class TrainingRun:
    """A recipe being trained in its folder; its loops see it as a `LoopRun`."""

    task: Task
    policy: PolicyBundle
    writer: Writer

    def __init__(self, recipe: Recipe, folder: RunFolder, reporter: Reporter, ranks: Ranks = ALONE) -> None:
        self.recipe, self.ranks, self.folder, self.reporter = recipe, ranks, folder, reporter
        self.phase, self.step = phases_of(recipe)[0], 0
        self.resumed: Checkpoint | None = None
        """The checkpoint that the run is resumed from."""
        self.state: PhaseState | None = None
        """Of the phase under way, once it has a learner."""
        self.saver = Saver(folder.checkpoints)
        self.services = RunServices(recipe, folder, ranks)
        self.say, self.show_progress, self.pause_helpers = reporter.say, reporter.show_progress, self.services.pause

    async def train(self) -> None:
        """Train to the end, or to Ctrl-C or an empty budget; a checkpoint is saved either way."""
        with self.folder.lock(self.reporter.say):
            # Find where the folder's run stands; what it wrote after its last checkpoint is written again.
            self.resumed = self.folder.latest()
            if self.resumed is not None:
                self.phase, self.step = self.resumed.phase, self.resumed.step
                self.services.counters = json.loads((self.resumed.path / COUNTERS).read_text())
            if self.recipe != self.folder.recipe:
                self.folder.write_recipe(self.recipe)
            self.folder.rewind(phases_of(self.recipe), self.phase, self.step)
            self.ranks.barrier("folder")  # which the first rank has rewound
            self._load()
            self.writer.write_status("running")
            try:
                phases = phases_of(self.recipe)
                for phase in phases[phases.index(self.phase) :]:
                    if phase != self.phase:
                        self.phase, self.step = phase, 0
                    config = phase_config(self.recipe, phase)
                    method = method_of(config.method)
                    await method.train(self, config, method)
                self.saver.wait()
                self.ranks.barrier("saved")
            except BaseException as error:
                self._save_what_was_reached(error)
                raise
            finally:
                self.saver.close()
                self.writer.close()
            self.writer.write_status("finished")

    def _load(self) -> None:
        """Task, model and writer."""
        recipe, start = self.recipe, self.resumed.path if self.resumed is not None else None
        self.task = tasks.create(recipe.task.name, recipe.task.options, "task")
        self.policy = PolicyBundle(recipe, self.task, self.folder.path, start, self.reporter.say, self.ranks)
        if not self.ranks.first:  # all have the same weights now; noise is each one's own
            seed_torch(derive_seed(recipe.seed, "rank", self.ranks.rank))
        call_seconds.set(recipe.call_seconds)
        named = recipe.trackers if self.ranks.first else []
        trackers = make_trackers(named, self.folder.path, recipe.model_dump(mode="json"))
        self.writer = Writer(recipe, self.folder, self.reporter, self.task, self.policy.renderer.pieces, trackers)

    def _save_what_was_reached(self, error: BaseException) -> None:
        """Save the last finished step; not if an update is half done, when a resume takes the last checkpoint."""
        reason = reason_of(error)
        together = self.ranks.stop(reason, whole=self.state is not None and self.state.whole)
        try:
            self.saver.wait()
        except Exception as earlier:
            self.reporter.say(f"a checkpoint was not saved: {earlier}")
        try:
            if together:
                self.checkpoint()
                self.saver.wait()
        except Exception as second:
            self.reporter.say(f"nothing was saved: {second}")
        self.writer.write_status("stopped", reason=self.ranks.reason or reason)

    # What the loops see.

    @property
    def resumed_from(self) -> Path | None:
        """The checkpoint that this phase is resumed from; None if it begins here."""
        return self.resumed.path if self.resumed is not None and self.resumed.phase == self.phase else None

    def lines(self, step: int | None = None) -> Sequence[Mapping[str, Any]]:
        """What metrics.jsonl has of this phase, or of one step of it."""
        return self.folder.lines(self.phase, step)

    def open_services(self) -> AbstractAsyncContextManager[tuple[Services, RolloutContext]]:
        """Helper models, user and metrics, started, with the context they play in; closed at the end."""
        return self.services.open(self.policy, self.resumed_from)

    def begin(self, learner: Learner, config: TrainConfig) -> None:
        """The phase's learner is ready: from here on Ctrl-C saves."""
        self.state = PhaseState(learner, config, learner.steps)
        self.writer.begin(self.phase, config.steps, self.step)

    def step_done(self, step: int, logs: Logs, groups: Sequence[Sequence[Rollout]] = ()) -> None:
        """Write a finished step to the run folder, and a checkpoint when it is time."""
        state = self.state
        assert state is not None, "begin() comes first"
        logs |= self.writer.write_replies(step, groups)
        logs |= self.services.finish_step()
        logs["time/save"] = self.saver.spent()
        self.folder.append_metrics(self.phase, step, logs)
        # From here on the step counts as finished: Ctrl-C would save the run as it is after it.
        self.step, state.updates = step, state.learner.steps
        self.writer.announce(step, logs)
        # A step that taught nothing is passed over; several in a row end the run.
        why = bad_step(logs)
        state.bad_steps = state.bad_steps + 1 if why else 0
        if state.bad_steps >= state.config.max_skipped:
            raise UserError(
                f"step {step}: {why}, {state.bad_steps} times in a row (train.max_skipped); {self._last_good()}"
            )
        if why:
            self.reporter.say(f"step {step}: {why}; nothing was learned in this step")
        # By the clock ranks would disagree about when a checkpoint is due: the first one decides for all.
        if not state.bad_steps and self.ranks.broadcast_object("due", self.saver.due(step, state.config)):
            self.checkpoint()

    def write_evaluation(self, logs: Logs) -> None:
        """Write a line of nothing but an evaluation."""
        self.folder.append_metrics(self.phase, self.step, logs)
        self.writer.announce(self.step, logs)

    def checkpoint(self, best: BestMark | None = None) -> None:
        """Save the run as it was after its last finished step, in the background; `best`: it is the best one yet."""
        assert self.state is not None, "begin() comes first"
        learner = self.state.learner
        if not all_finite(learner.parameters):
            raise UserError(
                f"the weights are not finite after step {self.step}, and are not saved; {self._last_good()}"
            )
        self.saver.save(self.phase, self.step, self.recipe.train.save.keep, lambda: self._snapshot(learner), best)

    def _snapshot(self, learner: Learner) -> Callable[[Path], None]:
        """What writes the state of the run, as it is now, into a folder."""
        self.ranks.barrier("save")  # from here on it waits blindly for the first rank
        parts = [learner.snapshot()]
        if self.policy.samples and self.ranks.first:
            parts.append(self.policy.sampler.snapshot())
        counters = self.services.counters

        def write(folder: Path) -> None:
            for part in parts:
                part(folder)
            write_json(folder / COUNTERS, counters)

        return write

    def _last_good(self) -> str:
        self.saver.wait()
        latest, lower = self.folder.latest(), "with a lower train.lr or train.optimizer.grad_clip"
        if latest is None:
            return f"no good checkpoint was saved yet; start again {lower}"
        return f"the last good checkpoint is {latest.path}; start from it {lower}"


def train(
    recipe: Recipe,
    folder: RunFolder | None = None,
    reporter: Reporter | None = None,
    ranks: Ranks = ALONE,
    checked: bool = False,
) -> RunFolder:
    """Run a recipe to its end in this process; the run folder. SIGTERM stops and saves as Ctrl-C does.

    One of several ranks is given the folder: that of the first rank, read only everywhere else. `checked`: somebody has
    made the checks before.
    """
    new = folder is None
    if not checked:
        checks.refuse(checks.find(recipe, resumed=not new, ranks=ranks.size))
    folder = folder or RunFolder.create(recipe)
    reporter = reporter or Reporter()
    try:
        with exit_as_signalled(), lease(recipe.serve, reporter.say), serve_policy(recipe, folder.path, reporter.say):
            asyncio.run(run_until_terminated(TrainingRun(recipe, folder, reporter, ranks).train(), ranks))
    except BaseException:
        if new:
            folder.drop_failed_start()
        raise
    finally:
        reporter.close()
        gc.collect()  # model and engine refer to each other; their memory is needed by whatever runs next
    return folder
