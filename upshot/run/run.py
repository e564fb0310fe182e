"""One run from recipe to checkpoint: the phases, one after another, and where they stand.

The model and what is made of it: `loaded.py`. What is written and told: `writer.py`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from upshot.config.model_spec import ModelSpec
from upshot.config.phases import phase_config, phases_of
from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.conversation import Row, derive_seed
from upshot.core.errors import UserError, reason_of
from upshot.core.time_limit import call_seconds
from upshot.core.whole_files import write_json
from upshot.models.rendering import Renderer
from upshot.rollout.context import RolloutContext
from upshot.rollout.prompt_length import fitting
from upshot.rollout.rollout import Rollout
from upshot.rollout.services import Services, build_context, build_services
from upshot.run import checks
from upshot.run.checks.bench import room_of
from upshot.run.folder import RunFolder
from upshot.run.policy_server import served
from upshot.run.reporter import Reporter
from upshot.run.saver import Saver
from upshot.run.trackers import make_trackers
from upshot.run.writer import Logs, Writer
from upshot.serving.servers.lease import lease
from upshot.tasks.base import Task, tasks
from upshot.training.learner.distributed.process_group import ProcessGroup, RankStopped, until_stopped
from upshot.training.learner.distributed.ranks import ALONE, Ranks, add_counts
from upshot.training.learner.learner import Learner
from upshot.training.learner.memory.fit import configure_helpers, make_pool
from upshot.training.loops import dpo, online_dpo, ppo, rl, sft
from upshot.training.metrics.alarms import Alarms, bad_step
from upshot.training.metrics.best import BestMark
from upshot.training.metrics.throughput import ThroughputMeter, finite
from upshot.training.policy import PolicyBundle
from upshot.training.setup import context_limit, seed_torch

COUNTERS = "counters.json"
"""In a checkpoint: what the helpers' counters were."""


class TrainingRun:
    """A recipe being trained in its folder."""

    task: Task
    loaded: PolicyBundle
    writer: Writer
    meter: ThroughputMeter

    def __init__(self, recipe: Recipe, folder: RunFolder, reporter: Reporter, ranks: Ranks = ALONE) -> None:
        self.recipe = recipe
        self.ranks = ranks
        self.folder = folder
        self.reporter = reporter
        self.phases = phases_of(recipe)
        self.phase, self.step = self.phases[0], 0
        self.start_from: Path | None = None
        """The checkpoint that the run goes on from."""
        self._resumes = ""
        """The phase that it goes on with."""
        self.saver = Saver(folder.checkpoints)
        self.alarms = Alarms()
        self.counters: dict[str, Any] = {}
        """What the helpers' counters were after the last finished step: those of a step half done are played again."""
        self._added_up: dict[str, Any] = {}
        """The helpers' counters when the ranks' were last added up."""
        self._counted: tuple[Logs, dict[str, Any]] = {}, {}
        """What the helpers have counted for the step under way: numbers for its line, and their counters."""
        self.services_now: Services | None = None
        self._learning: tuple[Learner, TrainConfig] | None = None
        self._updates = 0
        """Optimizer steps of the learner when the last line was written."""
        self._bad_steps = 0
        """Steps in a row that ended without a finite loss and gradient."""

    @property
    def module(self) -> Any:
        """The model in training."""
        return self.loaded.module

    @property
    def renderer(self) -> Renderer:
        """Messages → ids of the model in training."""
        return self.loaded.renderer

    async def train(self) -> Path:
        """Train to the end, or to Ctrl-C or an empty budget; the last checkpoint either way."""
        with self.folder.locked(self.reporter.say):
            self._go_on()
            self.ranks.barrier("folder")  # which the first rank has rewound
            await self._prepare()
            self.writer.status("running")
            try:
                for phase in self.phases[self.phases.index(self.phase) :]:
                    if phase != self.phase:
                        self.phase, self.step = phase, 0
                    config = phase_config(self.recipe, phase)
                    await METHODS[config.method](self, config)
                self.saver.wait()
                self.ranks.barrier("saved")
            except BaseException as error:
                self._stopped(error)
                raise
            finally:
                self.saver.close()
                self.writer.close()
            self.writer.status("finished")
            latest = self.folder.latest()
            assert latest is not None
            return latest.path

    def _go_on(self) -> None:
        """Find where the folder's run stands; what it wrote after its last checkpoint is written again."""
        found = self.folder.latest()
        if found is not None:
            self.start_from, self.phase, self.step = found
            self._resumes = self.phase
            self.counters = json.loads((found.path / COUNTERS).read_text())
        if self.recipe != self.folder.recipe():
            self.folder.write_recipe(self.recipe)
        self.folder.rewind(self.phases, self.phase, self.step)

    async def _prepare(self) -> None:
        """Task, model and writer."""
        recipe = self.recipe
        self.task = tasks.create(recipe.task.name, recipe.task.options, "task")
        self.loaded = PolicyBundle(recipe, self.task, self.folder.path, self.start_from, self.reporter.say, self.ranks)
        if not self.ranks.first:  # all have the same weights now; noise is each one's own
            seed_torch(derive_seed(recipe.seed, "rank", self.ranks.rank))
        call_seconds.set(recipe.call_seconds)
        named = recipe.trackers if self.ranks.first else []
        trackers = make_trackers(named, self.folder.path, recipe.model_dump(mode="json"))
        self.writer = Writer(recipe, self.folder, self.reporter, self.task, self.renderer.spelled, trackers)

    def _stopped(self, error: BaseException) -> None:
        """Save what was reached, unless an update is half done: then the last checkpoint is what to go on from."""
        reason, learning = reason_of(error), self._learning
        whole = learning is not None and learning[0].steps == self._updates and not self._bad_steps
        together = self.ranks.stop(reason, whole)
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
        self.writer.status("stopped", reason=self.ranks.reason or reason)

    def say(self, text: str) -> None:
        """Tell whoever watches."""
        self.reporter.say(text)

    def within(self, done: int, total: int) -> None:
        """Tell how far the step under way is."""
        self.reporter.within(done, total)

    def lines(self, step: int | None = None) -> Sequence[Mapping[str, Any]]:
        """What metrics.jsonl has of this phase, or of one step of it."""
        return self.folder.lines(self.phase) if step is None else self.folder.lines(self.phase, step)

    def tell(self, logs: Logs) -> None:
        """Write a line of nothing but an evaluation."""
        self.writer.line(self.phase, self.step, logs)
        self.writer.announce(self.phase, self.step, logs)

    def lasting(self, config: TrainConfig, examples: int) -> TrainConfig:
        """The configuration with its epochs counted in steps."""
        settled = config.lasting(examples)
        if config.epochs is not None:
            self.reporter.say(f"{config.epochs:g} epochs of {examples} examples: {settled.steps} steps")
        return settled

    def learner(self, config: TrainConfig, value_head: bool = False) -> Learner:
        """A learner on the policy, restored when this phase is being resumed."""
        learner = self.loaded.learner(config, value_head)
        if self.start_from is not None and self._resumes == self.phase:
            learner.load(self.start_from)
        return learner

    def keep_reference(self, learner: Learner) -> None:
        """Give the learner the model that this phase began with; a resumed phase finds it again."""
        self.loaded.keep_reference(learner, self.phase == self.phases[0], begun=self.step > 0)

    def fitting(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows whose prompt leaves room for a reply, by the recipe's rule for those that do not."""
        context = context_limit(self.recipe.model, self.module)
        room = room_of(self.recipe, self.task, self.renderer, context)
        return fitting(rows, room, self.recipe.episode.long_prompts)

    @asynccontextmanager
    async def services(self) -> AsyncIterator[tuple[Services, RolloutContext]]:
        """Helper models, user and metrics, started, with the stage they play on; closed at the end."""
        recipe, loaded = limits_shared(self.recipe, self.ranks.size), self.loaded
        loaded.pool = make_pool(recipe, loaded.memory)
        helped = configure_helpers(recipe, loaded.memory)
        services = build_services(helped, self.task, loaded.sampler, loaded.tokenizer, loaded.renderer, loaded.pool)
        self.services_now = services
        if spent := self.folder.spent():
            services.budget.restore(spent)
        self.ranks.share(services.budget)
        services.restore(self.counters)
        self._added_up = services.counters()
        loaded.sampler.play_ahead(recipe.train.async_steps)
        if self.start_from is not None and self._resumes == self.phase:
            loaded.sampler.load_copies(self.start_from)
        try:
            await loaded.sampler.start()
            await services.start()
            yield services, build_context(recipe, services, loaded.policy())
        finally:
            self.services_now = None
            await services.aclose()
            if loaded.pool is not None:
                await loaded.pool.aclose()
                loaded.pool = None
            await loaded.close()
            self.folder.write_spent(services.budget.state())

    def begin(self, learner: Learner, config: TrainConfig) -> None:
        """The phase's learner is ready: from here on Ctrl-C saves."""
        self._learning, self._updates = (learner, config), learner.steps
        self.meter = ThroughputMeter(self.module, self.ranks.size)
        self.alarms = Alarms()
        for line in self.folder.lines(self.phase):
            self.alarms.watch(line)
        self.writer.begin(self.phase, config.steps, self.step)

    def count(self) -> None:
        """All that the step under way asked of helpers is done: its line tells of what they counted until now."""
        if (services := self.services_now) is not None:
            if self.ranks.size > 1:
                self._added_up = add_counts(self._added_up, self.ranks.all_gather_object("count", services.counters()))
                services.restore(self._added_up)
            self._counted = services.stats(), services.counters()

    def step_done(self, step: int, logs: Logs, groups: Sequence[Sequence[Rollout]] = ()) -> None:
        """Write a finished step to the run folder, and a checkpoint when it is time."""
        assert self._learning is not None, "begin() comes first"
        learner, config = self._learning
        logs |= self.writer.replies(step, groups)
        if self.services_now is not None:
            stats, self.counters = self._counted
            spent = self.services_now.budget.state()
            logs |= {**stats, "time/dollars": spent["dollars"]}
            self.folder.write_spent(spent)
        if self.loaded.pool is not None:
            logs |= self.loaded.pool.spent()
        logs["time/save"] = self.saver.spent()
        self.writer.line(self.phase, step, logs)
        self.step, self._updates = step, learner.steps
        for text in self.alarms.watch(logs):
            self.reporter.say(f"step {step}: {text}")
        self.writer.announce(self.phase, step, logs, list(self.alarms.ringing.values()))
        self._stop_if_bad(logs, config)
        self.saver.check()
        if not self._bad_steps and self.ranks.broadcast_object("due", self.saver.due(step, config)):
            self.checkpoint()

    def _stop_if_bad(self, logs: Logs, config: TrainConfig) -> None:
        """A step that taught nothing is passed over; several in a row are the end."""
        why = bad_step(logs)
        self._bad_steps = self._bad_steps + 1 if why else 0
        if self._bad_steps >= config.max_skipped:
            raise UserError(
                f"step {self.step}: {why}, {self._bad_steps} times in a row (train.max_skipped); {self._last_good()}"
            )

    def _last_good(self) -> str:
        self.saver.wait()
        latest = self.folder.latest()
        if latest is None:
            return "nothing good was saved yet; begin anew with a lower train.lr or train.optimizer.grad_clip"
        lower = "train.lr or train.optimizer.grad_clip"
        return f"the last good checkpoint is {latest.path}; begin from it with a lower {lower}"

    def checkpoint(self, best: BestMark | None = None) -> None:
        """Save the run as it was after its last finished step, in the background; `best`: it is the best one yet."""
        assert self._learning is not None, "begin() comes first"
        learner, _ = self._learning
        if not finite(learner.parameters):
            raise UserError(
                f"the weights are not finite after step {self.step}, and are not saved; {self._last_good()}"
            )
        keep = self.recipe.train.save.keep
        self.saver.save(self.phase, self.step, keep, lambda: self._snapshot(learner), best)

    def _snapshot(self, learner: Learner) -> Callable[[Path], None]:
        """What writes the state of the run, as it is now, into a folder."""
        self.ranks.barrier("save")  # from here on it waits blindly for the first rank
        parts = [learner.snapshot()]
        if self.loaded.samples and self.ranks.first:
            parts.append(self.loaded.sampler.snapshot())
        counters = self.counters

        def write(folder: Path) -> None:
            for part in parts:
                part(folder)
            write_json(folder / COUNTERS, counters)

        return write


METHODS = {"sft": sft.train, "dpo": dpo.train, "online-dpo": online_dpo.train, "ppo": ppo.train, "rl": rl.train}
"""Each is a file of this room."""


def train(
    recipe: Recipe, folder: RunFolder | None = None, reporter: Reporter | None = None, ranks: Ranks = ALONE
) -> RunFolder:
    """Run a recipe to its end in this process; the run folder. SIGTERM stops and saves as Ctrl-C does.

    One of several ranks is given the folder: that of the first rank, as an `Onlooker` everywhere else.
    """
    checks.refuse(checks.find(recipe, resumed=folder is not None, ranks=ranks.size))
    return train_checked(recipe, folder, reporter, ranks)


def train_checked(
    recipe: Recipe, folder: RunFolder | None = None, reporter: Reporter | None = None, ranks: Ranks = ALONE
) -> RunFolder:
    """The same for a recipe in which `checks.find` found nothing wrong."""
    new = folder is None
    folder = folder or RunFolder.create(recipe)
    reporter = reporter or Reporter()
    try:
        with lease(recipe.serve, reporter.say), served(recipe, folder.path, reporter.say):
            asyncio.run(_until_terminated(TrainingRun(recipe, folder, reporter, ranks)))
    except BaseException as error:
        if new:
            folder.drop_failed_start()
        if isinstance(error, asyncio.CancelledError):
            raise SystemExit(128 + signal.SIGTERM) from None
        if isinstance(error, RankStopped) and error.signal:
            raise (KeyboardInterrupt() if error.signal == signal.SIGINT else SystemExit(128 + error.signal)) from None
        raise
    finally:
        reporter.close()
        gc.collect()  # model and engine refer to each other; their memory is needed by whatever runs next
    return folder


async def _until_terminated(run: TrainingRun) -> None:
    """Train; SIGTERM, with which schedulers take machines away, cancels it: between steps, never inside an update."""
    training = asyncio.ensure_future(run.train())
    if isinstance(run.ranks, ProcessGroup):
        await until_stopped(run.ranks, training)
        return
    with suppress(RuntimeError, ValueError):  # in another thread the signals are somebody else's
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, training.cancel)
    await training


def limits_shared(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe of one rank: what an endpoint may be asked at once and in a minute is shared among all."""
    if ranks == 1:
        return recipe

    def shared(spec: ModelSpec) -> ModelSpec:
        paces = {name: getattr(spec, name) for name in ("requests_per_minute", "tokens_per_minute")}
        limits = {name: pace / ranks for name, pace in paces.items() if pace}
        return spec.model_copy(update={"concurrency": max(spec.concurrency // ranks, 1), **limits})

    return recipe.model_copy(update={"models": {role: shared(spec) for role, spec in recipe.models.items()}})
