"""One run from recipe to checkpoint: warm start, method, evaluation, run folder, resume."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from upshot.chat import Row, derive_seed
from upshot.engine.engine import Engine, EngineSettings
from upshot.jsonl import plain
from upshot.models.rendering import Renderer
from upshot.recipe import Recipe, TrainConfig
from upshot.rewards.task_metrics import task_metrics
from upshot.rollout.company import Company, of_recipe, stage_of
from upshot.rollout.policy import Policy
from upshot.rollout.reply import Reply
from upshot.rollout.room import fitting
from upshot.rollout.stage import Stage
from upshot.tasks.base import Task, groups_of, tasks
from upshot.time_limit import call_seconds
from upshot.train import checks, dpo, online_dpo, ppo, rl, sft
from upshot.train.adapters import add_lora, find_start
from upshot.train.checks.bench import room_of
from upshot.train.folder import RunFolder
from upshot.train.frozen import PolicyModel
from upshot.train.learner import Learner
from upshot.train.phases import phase_config, phases_of
from upshot.train.plan import SAMPLED
from upshot.train.reporter import Reporter
from upshot.train.setup import (
    context_limit,
    load_policy,
    sampling_of,
    seed_torch,
)
from upshot.train.summary import by_group
from upshot.train.trackers import Tracker, make_trackers
from upshot.train.weights import load_weights, save_weights
from upshot.whole_files import write_json

COUNTERS = "counters.json"
"""In a checkpoint: what the helpers' counters were."""


class Run:
    """A recipe being trained in its folder."""

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
        self.trackers: list[Tracker] = []
        self._learning: tuple[Learner, TrainConfig] | None = None
        self._updates = 0
        """Optimizer steps of the learner when the last line was written."""

    async def train(self) -> Path:
        """Train to the end, or to Ctrl-C or an empty budget; the last checkpoint either way."""
        with self.folder.locked(self.reporter.say):
            self._go_on()
            return await self._train()

    async def _train(self) -> Path:
        self._prepare()
        recipe = self.recipe
        call_seconds.set(recipe.call_seconds)
        self.trackers = make_trackers(recipe.trackers, self.folder.path, recipe.model_dump(mode="json"))
        self.folder.status("running")
        try:
            for phase in self.phases[self.phases.index(self.phase) :]:
                if phase != self.phase:
                    self.phase, self.step = phase, 0
                config = phase_config(recipe, phase)
                await METHODS[config.method](self, config)
        except BaseException as error:
            self._stopped(error)
            raise
        finally:
            for tracker in self.trackers:
                tracker.finish()
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

    def _stopped(self, error: BaseException) -> None:
        """Save what was reached, unless an update is half done: then the last checkpoint is what to go on from."""
        reason = str(error) or type(error).__name__
        try:
            if self._learning is not None and self._learning[0].steps == self._updates:
                self.checkpoint()
        except Exception as second:
            self.reporter.say(f"nothing was saved: {second}")
        self.folder.status("stopped", reason=reason)

    def _prepare(self) -> None:
        recipe = self.recipe
        self.task: Task = tasks.create(recipe.task.name, recipe.task.options, "task")
        checkpoint = str(self.start_from or "")
        seed_torch(recipe.seed)
        self.start = find_start(recipe.model, self.folder.path, self.reporter.say)
        module, tokenizer = self._load("" if recipe.model.lora else checkpoint)
        self.module = add_lora(module, recipe.model, checkpoint or self.start.adapter)
        self.tokenizer = tokenizer
        self.renderer = Renderer(self.tokenizer, recipe.model.template_options)
        template = self.renderer.check()
        if not template.appends:
            self.reporter.say(f"chat template: {template.reason}; rendering turn by turn instead, history is kept")

    @cached_property
    def engine(self) -> Engine:
        """The engine on the policy's own tensors; made for the first rollout, so that sft and dpo need none."""
        return Engine(self.module, self.renderer.end_ids, EngineSettings(exact=self.recipe.model.exact))

    @cached_property
    def sampler(self) -> PolicyModel:
        """The policy as a model."""
        return PolicyModel(self.engine, self.tokenizer, "policy", self.renderer, self.module)

    def _weights_changed(self) -> None:
        if "engine" in self.__dict__:
            self.engine.weights_changed()

    def _load(self, path: str = "") -> tuple[Any, Any]:
        """Module, without adapters, and tokenizer: those of a folder, or those that the run began with."""
        seed = derive_seed(self.recipe.seed, "weights")
        return load_policy(self.recipe.model, self.task, seed, path or self.start.model, self.start.adapter)

    def learner(self, config: TrainConfig, value_head: bool = False) -> Learner:
        """A learner on the policy, restored when this phase is being resumed."""
        episode = self.recipe.episode
        learner = Learner(
            self.module,
            self.tokenizer,
            config,
            max_tokens=episode.max_tokens,
            temperature=episode.temperature if config.method in SAMPLED else 1.0,
            changed=self._weights_changed,
            value_head=value_head,
            exact=self.recipe.model.exact and config.method in SAMPLED,
        )
        if self.start_from is not None and self.step:
            learner.load(self.start_from)
        return learner

    def lasting(self, config: TrainConfig, examples: int) -> TrainConfig:
        """The configuration with its epochs counted in steps."""
        settled = config.lasting(examples)
        if config.epochs is not None:
            self.reporter.say(f"{config.epochs:g} epochs of {examples} examples: {settled.steps} steps")
        return settled

    def keep_reference(self, learner: Learner) -> None:
        """Give the learner the model that this phase began with; a resumed phase finds it again."""
        saved = self.folder.path / "reference"
        # The whole of a model that is where the recipe says is not kept a second time.
        elsewhere = self.phase == self.phases[0] and self.recipe.model.lora is None
        if self.step == 0:
            learner.keep_reference()
            if not elsewhere:
                save_weights(saved, learner.reference)
        elif elsewhere:
            learner.keep_reference(dict(self._load()[0].named_parameters()))
        else:
            learner.keep_reference(load_weights(saved))

    def fitting(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows whose prompt leaves room for a reply, by the recipe's rule for those that do not."""
        context = context_limit(self.recipe.model, self.module)
        room = room_of(self.recipe, self.task, self.renderer, context)
        return fitting(rows, room, self.recipe.episode.long_prompts)

    @asynccontextmanager
    async def company(self) -> AsyncIterator[tuple[Company, Stage]]:
        """Helper models, user and metrics, started, with the stage they play on; closed at the end."""
        recipe = self.recipe
        policy = Policy(
            self.sampler,
            self.renderer,
            sampling_of(recipe),
            context_limit(recipe.model, self.module),
            recipe.episode.system,
            self.task.tools(),
            recipe.episode.think,
        )
        company = of_recipe(recipe, self.task, self.sampler, self.tokenizer, self.renderer)
        self.company_now = company
        if spent := self.folder.spent():
            company.budget.restore(spent)
        company.restore(self.counters)
        if self.start_from is not None and self.step:
            self.sampler.load_copies(self.start_from)
        try:
            await company.start()
            yield company, stage_of(recipe, company, policy)
        finally:
            self.company_now = None
            await company.aclose()
            self.folder.write_spent(company.budget.state())

    def begin(self, learner: Learner, config: TrainConfig) -> None:
        """The phase's learner is ready: from here on Ctrl-C saves."""
        self._learning, self._updates = (learner, config), learner.steps
        self.reporter.phase(self.phase, config.steps, self.step)

    def step_done(self, step: int, logs: dict[str, float], groups: Sequence[Sequence[Reply]] = ()) -> None:
        """Write a finished step to the run folder, and a checkpoint when it is time."""
        assert self._learning is not None, "begin() comes first"
        learner, config = self._learning
        replies = [reply for group in groups for reply in group]
        if replies:
            logs |= by_group(replies, self._groups_of, lambda reply: reply.reward.total)
            logs |= task_metrics(groups, self.task.groups)
            kept = replies[: self.recipe.keep_rollouts or None]
            self.folder.samples(step, kept)
            self.folder.rollouts(self._transcripts(step, kept))
        if self.company_now is not None:
            logs |= self.company_now.stats()
            self.counters = self.company_now.counters()
            self.folder.write_spent(self.company_now.budget.state())
        self.folder.metrics(self.phase, step, logs)
        self.step, self._updates = step, learner.steps
        self.announce(step, logs)
        if config.save_every and step % config.save_every == 0 and step < config.steps:
            self.checkpoint()

    def announce(self, step: int, logs: Mapping[str, Any]) -> None:
        """Tell the console and the trackers what metrics.jsonl has been told."""
        numbers = {name: value for name, value in plain(logs).items() if isinstance(value, (int, float))}
        self.reporter.step(self.phase, step, numbers)
        for tracker in self.trackers:
            tracker.log(step, {f"{self.phase}/{name}": value for name, value in numbers.items()})

    def checkpoint(self) -> None:
        """Save the run as it was after its last finished step."""
        assert self._learning is not None, "begin() comes first"
        learner, config = self._learning

        def write(folder: Path) -> None:
            learner.save(folder)
            write_json(folder / COUNTERS, self.counters)
            if "sampler" in self.__dict__:
                self.sampler.save_copies(folder)

        self.start_from = self.folder.checkpoints.save(self.phase, self.step, config.keep, write)

    def _transcripts(self, step: int, replies: Sequence[Reply]) -> Iterator[dict[str, Any]]:
        """Lines for rollouts.jsonl; a reply that cannot be written (a detail that is no mapping) is said, not fatal."""
        for reply in replies:
            try:
                yield reply.to_dict(step, self._groups_of(reply), self.renderer.spelled)
            except Exception as error:
                self.reporter.say(f"a reply to row '{reply.conversation.row.id}' cannot be written: {error!r}")

    def _groups_of(self, reply: Reply) -> Mapping[str, str]:
        return groups_of(self.task, reply.conversation.row)


METHODS = {"sft": sft.train, "dpo": dpo.train, "online-dpo": online_dpo.train, "ppo": ppo.train, "rl": rl.train}
"""Each is a file of this room."""


def train(recipe: Recipe, folder: RunFolder | None = None, reporter: Reporter | None = None) -> RunFolder:
    """Run a recipe to its end in this process; the run folder."""
    found = checks.find(recipe, resumed=folder is not None)
    checks.refuse(found)
    return train_checked(recipe, folder, reporter)


def train_checked(recipe: Recipe, folder: RunFolder | None = None, reporter: Reporter | None = None) -> RunFolder:
    """The same for a recipe in which `checks.find` found nothing wrong."""
    new = folder is None
    folder = folder or RunFolder.create(recipe)
    reporter = reporter or Reporter()
    try:
        asyncio.run(Run(recipe, folder, reporter).train())
    except BaseException:
        if new:
            folder.drop_failed_start()
        raise
    finally:
        reporter.close()
        gc.collect()  # model and engine refer to each other; their memory is needed by whatever runs next
    return folder
