"""One run from recipe to checkpoint: warm start, method, evaluation, run folder, resume."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from upshot.chat import derive_seed
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.model import EngineModel
from upshot.errors import UserError
from upshot.models.rendering import Renderer
from upshot.recipe import Recipe, TrainConfig, WarmStartConfig
from upshot.rewards.task_metrics import task_metrics
from upshot.rollout.company import Company, check_names, of_recipe, stage_of
from upshot.rollout.policy import Policy
from upshot.rollout.reply import Reply
from upshot.rollout.stage import Stage
from upshot.tasks.base import Task, groups_of, tasks
from upshot.time_limit import call_seconds
from upshot.train.folder import RunFolder
from upshot.train.learner import Learner
from upshot.train.plan import SAMPLED, count_examples
from upshot.train.reporter import Reporter
from upshot.train.setup import (
    add_lora,
    check_helpers,
    context_limit,
    load_policy,
    sampling_of,
    seed_torch,
)
from upshot.train.summary import by_group
from upshot.train.trackers import Tracker, make_trackers

WARM_START = "warm-start"


class Run:
    """A recipe being trained in its folder."""

    def __init__(self, recipe: Recipe, folder: RunFolder, reporter: Reporter) -> None:
        self.recipe = recipe
        self.folder = folder
        self.reporter = reporter
        warm = recipe.warm_start
        warmed = warm is not None and not (warm.new_model_only and recipe.model.path)
        self.phases: list[str] = [*([WARM_START] if warmed else []), recipe.train.method]
        found = folder.latest()
        self.start_from = found[0] if found else None
        self.spent: dict[str, float] = {}
        if self.start_from is not None and (self.start_from / "budget.json").is_file():
            self.spent = json.loads((self.start_from / "budget.json").read_text())
        self.counters: dict[str, Any] = {}
        """What the helpers' counters were after the last finished step: those of a step half done are played again."""
        if self.start_from is not None and (self.start_from / "counters.json").is_file():
            self.counters = json.loads((self.start_from / "counters.json").read_text())
        self.company_now: Company | None = None
        self.trackers: list[Tracker] = []
        self.phase, self.step = (found[1], found[2]) if found else (self.phases[0], 0)
        folder.rewind(self.phases, self.phase, self.step)
        self._save: Callable[[], None] = lambda: None

    async def train(self) -> Path:
        """Train to the end, or to Ctrl-C or an empty budget; the last checkpoint either way."""
        self._prepare()
        recipe = self.recipe
        call_seconds.set(recipe.call_seconds)
        self.trackers = make_trackers(recipe.trackers, self.folder.path, recipe.model_dump(mode="json"))
        if self.phase == WARM_START and recipe.train.method in SAMPLED:
            await check_helpers(recipe, self.task, self.tokenizer)
        self.folder.status("running")
        try:
            for phase in self.phases[self.phases.index(self.phase) :]:
                if phase != self.phase:
                    self.phase, self.step = phase, 0
                await self._run_phase(phase)
        except BaseException as error:
            self._save()
            self.folder.status("stopped", reason=str(error) or type(error).__name__)
            raise
        finally:
            for tracker in self.trackers:
                tracker.finish()
        self.folder.status("finished")
        latest = self.folder.latest()
        assert latest is not None
        return latest[0]

    def _prepare(self) -> None:
        recipe = self.recipe
        self.task: Task = tasks.create(recipe.task.name, recipe.task.options, "task")
        if recipe.model.path:  # takes long to load: what it is to learn from is looked for first
            count_examples(recipe, self.task)
        start = str(self.start_from) if self.start_from else ""
        seed_torch(recipe.seed)
        module, self.tokenizer = self._load("" if recipe.model.lora else start)
        self.module = add_lora(module, recipe.model, start)
        self.renderer = Renderer(self.tokenizer, recipe.model.template_options)
        template = self.renderer.check()
        if not template.appends:
            self.reporter.say(f"chat template: {template.reason}; rendering turn by turn instead, history is kept")

    @cached_property
    def engine(self) -> Engine:
        """The engine on the policy's own tensors; made for the first rollout, so that sft and dpo need none."""
        return Engine(self.module, self.renderer.end_ids, EngineSettings(exact=self.recipe.model.exact))

    @cached_property
    def sampler(self) -> EngineModel:
        """The policy as a model."""
        return EngineModel(self.engine, self.tokenizer, "policy", self.renderer)

    def _weights_changed(self) -> None:
        if "engine" in self.__dict__:
            self.engine.weights_changed()

    def _load(self, start: str = "") -> tuple[Any, Any]:
        seed = derive_seed(self.recipe.seed, "weights")
        return load_policy(self.recipe.model, self.task, seed, start)

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
        if self.recipe.model.lora is not None:
            return  # the reference is the adapter switched off
        saved = self.folder.path / "reference"
        first = self.phase == self.phases[0]
        if self.step == 0:
            learner.keep_reference()
            if not first:  # trained in this run, so that nothing else can bring it back
                self.module.save_pretrained(saved)
                self.tokenizer.save_pretrained(saved)
            return
        if not first and not saved.is_dir():
            raise UserError(f"'{saved}' is gone: the model that the run's reference is cannot be found again")
        learner.keep_reference(self._load("" if first else str(saved))[0])

    async def _run_phase(self, phase: str) -> None:
        """A phase is a module of this room with `async def train(run, config)`."""
        recipe = self.recipe
        if phase == WARM_START and recipe.warm_start is not None:
            method, config = "sft", warm_start_config(recipe.warm_start, recipe.train)
        else:
            method, config = phase, recipe.train
        module = importlib.import_module(f"upshot.train.{method.replace('-', '_')}")
        await module.train(self, config)

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
        if self.spent:
            company.budget.restore(self.spent)
        company.restore(self.counters)
        try:
            await company.start()
            yield company, stage_of(recipe, company, policy)
        finally:
            self.spent = company.budget.state()
            self.company_now = None
            await company.aclose()

    def begin(self, learner: Learner, config: TrainConfig) -> None:
        """The phase's learner is ready: from here on Ctrl-C saves."""
        self._save = lambda: self.checkpoint(learner, config)
        self.reporter.phase(self.phase, config.steps, self.step)

    def step_done(
        self,
        step: int,
        logs: dict[str, float],
        learner: Learner,
        config: TrainConfig,
        groups: Sequence[Sequence[Reply]] = (),
    ) -> None:
        """Write a finished step to the run folder, and a checkpoint when it is time."""
        replies = [reply for group in groups for reply in group]
        if replies:
            logs |= by_group(replies, self._groups_of, lambda reply: reply.reward.total)
            logs |= task_metrics(groups, self.task.groups)
            kept = replies[: self.recipe.keep_rollouts or None]
            self.folder.rollouts(reply.to_dict(step, self._groups_of(reply)) for reply in kept)
        if self.company_now is not None:
            logs |= self.company_now.stats()
            self.counters = self.company_now.counters()
        self.step = step
        self.folder.metrics(self.phase, step, logs)
        self.reporter.step(self.phase, step, logs)
        for tracker in self.trackers:
            tracker.log(step, {f"{self.phase}/{key}": value for key, value in logs.items()})
        if config.save_every and step % config.save_every == 0 and step < config.steps:
            self.checkpoint(learner, config)

    def checkpoint(self, learner: Learner, config: TrainConfig) -> None:
        """Save the run as it is now."""

        def write(folder: Path) -> None:
            learner.save(folder)
            spent = self.company_now.budget.state() if self.company_now is not None else self.spent
            (folder / "budget.json").write_text(json.dumps(spent))
            (folder / "counters.json").write_text(json.dumps(self.counters))

        self.start_from = self.folder.save(self.phase, self.step, config.keep, write)

    def _groups_of(self, reply: Reply) -> Mapping[str, str]:
        return groups_of(self.task, reply.conversation.row)


def warm_start_config(warm: WarmStartConfig, train: TrainConfig) -> TrainConfig:
    """The warm start as a training configuration of its own."""
    return train.model_copy(
        update={
            "method": "sft",
            "steps": warm.steps,
            "epochs": None,
            "prompts_per_step": warm.batch,
            "lr": warm.lr,
            "warmup_steps": warm.warmup_steps,
            "schedule": "cosine",
            "min_lr": 0.0,
            "minibatches": 1,
            "length_norm": "token",
        }
    )


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
