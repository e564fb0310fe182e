"""One run from recipe to checkpoint: the phases, one after another, and where they stand.

The model and what is made of it: `trainee.py`. What is written and told: `writer.py`.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from upshot.models.rendering import Renderer
from upshot.recipe import Recipe, TrainConfig
from upshot.rollout.company import Company, check_names, of_recipe, stage_of
from upshot.rollout.reply import Reply
from upshot.rollout.stage import Stage
from upshot.tasks.base import Task, tasks
from upshot.time_limit import call_seconds
from upshot.train import dpo, online_dpo, ppo, rl, sft
from upshot.train.folder import RunFolder
from upshot.train.learner import Learner
from upshot.train.phases import WARM_START, phase_config, phases_of
from upshot.train.plan import SAMPLED, count_examples
from upshot.train.reporter import Reporter
from upshot.train.setup import check_helpers
from upshot.train.trackers import make_trackers
from upshot.train.trainee import Trainee
from upshot.train.writer import Logs, Writer
from upshot.whole_files import write_json

COUNTERS = "counters.json"
"""In a checkpoint: what the helpers' counters were."""


class Run:
    """A recipe being trained in its folder."""

    task: Task
    trainee: Trainee
    writer: Writer

    def __init__(self, recipe: Recipe, folder: RunFolder, reporter: Reporter) -> None:
        self.recipe = recipe
        self.folder = folder
        self.reporter = reporter
        self.phases = phases_of(recipe)
        self.phase, self.step = self.phases[0], 0
        self.start_from: Path | None = None
        """The checkpoint that the run goes on from."""
        self.counters: dict[str, Any] = {}
        """What the helpers' counters were after the last finished step: those of a step half done are played again."""
        self.company_now: Company | None = None
        self._learning: tuple[Learner, TrainConfig] | None = None
        self._updates = 0
        """Optimizer steps of the learner when the last line was written."""

    @property
    def module(self) -> Any:
        """The model in training."""
        return self.trainee.module

    @property
    def renderer(self) -> Renderer:
        """Messages → ids of the model in training."""
        return self.trainee.renderer

    async def train(self) -> Path:
        """Train to the end, or to Ctrl-C or an empty budget; the last checkpoint either way."""
        with self.folder.locked(self.reporter.say):
            self._go_on()
            await self._prepare()
            self.folder.status("running")
            try:
                for phase in self.phases[self.phases.index(self.phase) :]:
                    if phase != self.phase:
                        self.phase, self.step = phase, 0
                    config = phase_config(self.recipe, phase)
                    await METHODS[config.method](self, config)
            except BaseException as error:
                self._stopped(error)
                raise
            finally:
                self.writer.close()
            self.folder.status("finished")
            latest = self.folder.latest()
            assert latest is not None
            return latest.path

    def _go_on(self) -> None:
        """Find where the folder's run stands; what it wrote after its last checkpoint is written again."""
        found = self.folder.latest()
        if found is not None:
            self.start_from, self.phase, self.step = found
            self.counters = json.loads((found.path / COUNTERS).read_text())
        if self.recipe != self.folder.recipe():
            self.folder.write_recipe(self.recipe)
        self.folder.rewind(self.phases, self.phase, self.step)

    async def _prepare(self) -> None:
        """Task, model and writer; what would fail only after the warm start fails here."""
        recipe = self.recipe
        self.task = tasks.create(recipe.task.name, recipe.task.options, "task")
        if recipe.model.path:  # takes long to load: what it is to learn from is looked for first
            count_examples(recipe, self.task)
        self.trainee = Trainee(recipe, self.task, self.folder.path, self.start_from, self.reporter.say)
        call_seconds.set(recipe.call_seconds)
        trackers = make_trackers(recipe.trackers, self.folder.path, recipe.model_dump(mode="json"))
        self.writer = Writer(recipe, self.folder, self.reporter, self.task, self.renderer.spelled, trackers)
        if self.phase == WARM_START and recipe.train.method in SAMPLED:
            await check_helpers(recipe, self.task, self.trainee.tokenizer)

    def _stopped(self, error: BaseException) -> None:
        """Save what was reached, unless an update is half done: then the last checkpoint is what to go on from."""
        reason = str(error) or type(error).__name__
        try:
            if self._learning is not None and self._learning[0].steps == self._updates:
                self.checkpoint()
        except Exception as second:
            self.reporter.say(f"nothing was saved: {second}")
        self.folder.status("stopped", reason=reason)

    def lasting(self, config: TrainConfig, examples: int) -> TrainConfig:
        """The configuration with its epochs counted in steps."""
        settled = config.lasting(examples)
        if config.epochs is not None:
            self.reporter.say(f"{config.epochs:g} epochs of {examples} examples: {settled.steps} steps")
        return settled

    def learner(self, config: TrainConfig, value_head: bool = False) -> Learner:
        """A learner on the policy, restored when this phase is being resumed."""
        learner = self.trainee.learner(config, value_head)
        if self.start_from is not None and self.step:
            learner.load(self.start_from)
        return learner

    def keep_reference(self, learner: Learner) -> None:
        """Give the learner the model that this phase began with; a resumed phase finds it again."""
        self.trainee.keep_reference(learner, self.phase == self.phases[0], begun=self.step > 0)

    @asynccontextmanager
    async def company(self) -> AsyncIterator[tuple[Company, Stage]]:
        """Helper models, user and metrics, started, with the stage they play on; closed at the end."""
        recipe, trainee = self.recipe, self.trainee
        company = of_recipe(recipe, self.task, trainee.sampler, trainee.tokenizer, trainee.renderer)
        self.company_now = company
        if spent := self.folder.spent():
            company.budget.restore(spent)
        company.restore(self.counters)
        if self.start_from is not None and self.step:
            trainee.sampler.load_copies(self.start_from)
        try:
            await company.start()
            yield company, stage_of(recipe, company, trainee.policy())
        finally:
            self.company_now = None
            await company.aclose()
            self.folder.write_spent(company.budget.state())

    def begin(self, learner: Learner, config: TrainConfig) -> None:
        """The phase's learner is ready: from here on Ctrl-C saves."""
        self._learning, self._updates = (learner, config), learner.steps
        self.reporter.phase(self.phase, config.steps, self.step)

    def step_done(self, step: int, logs: Logs, groups: Sequence[Sequence[Reply]] = ()) -> None:
        """Write a finished step to the run folder, and a checkpoint when it is time."""
        assert self._learning is not None, "begin() comes first"
        learner, config = self._learning
        logs |= self.writer.replies(step, groups)
        if self.company_now is not None:
            logs |= self.company_now.stats()
            self.counters = self.company_now.counters()
            self.folder.write_spent(self.company_now.budget.state())
        self.writer.line(self.phase, step, logs)
        self.step, self._updates = step, learner.steps
        self.writer.announce(self.phase, step, logs)
        if config.save_every and step % config.save_every == 0 and step < config.steps:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Save the run as it was after its last finished step."""
        assert self._learning is not None, "begin() comes first"
        learner, config = self._learning

        def write(folder: Path) -> None:
            learner.save(folder)
            write_json(folder / COUNTERS, self.counters)
            if self.trainee.samples:
                self.trainee.sampler.save_copies(folder)

        self.start_from = self.folder.checkpoints.save(self.phase, self.step, config.keep, write)


METHODS = {"sft": sft.train, "dpo": dpo.train, "online-dpo": online_dpo.train, "ppo": ppo.train, "rl": rl.train}
"""Each is a file of this room."""


def train(recipe: Recipe, folder: RunFolder | None = None, reporter: Reporter | None = None) -> RunFolder:
    """Run a recipe to its end in this process; the run folder."""
    check_names(recipe)
    folder = folder or RunFolder.create(recipe)
    reporter = reporter or Reporter()
    try:
        asyncio.run(Run(recipe, folder, reporter).train())
    finally:
        reporter.close()
        gc.collect()  # model and engine refer to each other; their memory is needed by whatever runs next
    return folder
