"""From a recipe to the objects that play and learn. Everything is checked before anything slow is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upshot.chat import derive_seed
from upshot.errors import UserError
from upshot.models.base import Completion, Model, Request, Sampling
from upshot.models.budget import Budget
from upshot.models.connect import connect_all
from upshot.models.local import BorrowedModel, load_whole, own_tokenizer, pick_device, pick_dtype
from upshot.participants.base import Participant, users
from upshot.recipe import PolicyConfig, Recipe
from upshot.rewards.build import build_metric, check_metric
from upshot.rewards.managers.base import Manager, managers
from upshot.rewards.metric import Metric
from upshot.rewards.reward import Weighted
from upshot.rollout.play import ReplyRule, Scene
from upshot.rollout.policy import Policy
from upshot.tasks.base import Task, tasks

CONTEXT = {"task": None, "judge": None, "tokenizer": None, "models": None, "sandbox": None, "manager": None}
"""What the program itself hands to metrics and users that name it."""


def check_names(recipe: Recipe) -> None:
    """Refuse unknown tasks, metrics, users and their options, before any work."""
    tasks.check(recipe.task.name, recipe.task.options, "task")
    for metric in recipe.reward.metrics:
        check_metric(metric.name, metric.options, "reward.metrics", **CONTEXT)
    managers.check(recipe.reward.manager.name, recipe.reward.manager.options, "reward.manager", **CONTEXT)
    if recipe.futures.user is not None:
        users.check(recipe.futures.user.name, recipe.futures.user.options, "futures.user", **CONTEXT)


def load_policy(config: PolicyConfig, task: Task, seed: int, path: str = "", adapter: str = "") -> tuple[Any, Any]:
    """The policy's module and tokenizer: from a folder or name, or a new tiny one for the task's language.

    The tokenizer is that of `adapter` where one was saved with it; the adapter itself is not loaded.
    """
    path = path or config.path
    device = pick_device(config.device)
    if path:
        from transformers.utils import logging

        logging.disable_progress_bar()  # the run has its own
        module, tokenizer = load_whole(path, config.dtype, device)
        tokenizer = (own_tokenizer(adapter) if adapter else None) or tokenizer
    else:
        from upshot.models.tiny import tiny_model, tiny_tokenizer

        words = task.vocabulary()
        if not words:
            raise UserError(f"task '{task.name}' speaks a real language; name a model with model.path=FOLDER")
        tokenizer = tiny_tokenizer(words)
        module = tiny_model(config.tiny, tokenizer, seed).to(device, pick_dtype(config.dtype, device))
    if config.chat_template:
        file = Path(config.chat_template)
        is_file = len(config.chat_template) < 256 and file.is_file()
        tokenizer.chat_template = file.read_text() if is_file else config.chat_template
    if config.gradient_checkpointing:
        module.gradient_checkpointing_enable()
    return module, tokenizer


def seed_torch(seed: int) -> None:
    """What draws from torch's own stream (new adapters, dropout) follows the run's seed."""
    import torch

    torch.manual_seed(derive_seed(seed, "torch"))


def context_limit(config: PolicyConfig, module: Any) -> int:
    """Most tokens of prompt and reply together."""
    return config.max_context or int(getattr(module.config.get_text_config(), "max_position_embeddings", 0) or 0)


@dataclass
class Company:
    """Everybody but the policy: task, helper models, user, metrics. Closed together."""

    task: Task
    models: dict[str, Model]
    user: Participant | None
    metrics: dict[str, Metric]
    weights: dict[str, Weighted]
    budget: Budget
    manager: Manager
    closers: list[Any] = field(default_factory=list)

    async def start(self) -> None:
        """Check keys and endpoints before any work."""
        for model in dict.fromkeys(self.models.values()):
            await model.start()

    def stats(self) -> dict[str, float]:
        """Calls, cost, latency and quality of everybody, for the metrics; keys with times start with time/."""
        out: dict[str, float] = {}
        for name, model in self.models.items():
            for key, value in model.stats().items():
                out[f"{'time/' if 'latency' in key else ''}model/{name}/{key}"] = value
        if self.user is not None:
            out |= {f"user/{key}": value for key, value in self.user.stats().items()}
        for key, value in self.manager.stats().items():  # forks depend on the machine and on how often the run resumed
            out[f"{'time/' if 'forks' in key else ''}manager/{key}"] = value
        return out

    def counters(self) -> dict[str, Any]:
        """The counters behind `stats`, to be saved with the run."""
        return {name: thing.state() for name, thing in self._counting()}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Go on counting where the saved run stopped."""
        for name, thing in self._counting():
            if name in counters:
                thing.restore(counters[name])

    def _counting(self) -> list[tuple[str, Model | Participant | Manager]]:
        user = [("user", self.user)] if self.user is not None else []
        return [*((f"model/{name}", model) for name, model in self.models.items()), *user, ("manager", self.manager)]

    async def aclose(self) -> None:
        """Release everything."""
        models = dict.fromkeys(self.models.values())
        things = [*self.metrics.values(), self.user, self.task, *models, *self.closers, self.manager]
        for thing in things:
            if thing is not None:
                await thing.aclose()


def assemble(recipe: Recipe, task: Task, policy_model: Model, tokenizer: Any) -> Company:
    """Helper models, simulated user and metrics of a recipe."""
    limits = recipe.budget
    budget = Budget(limits.max_calls, limits.max_tokens, limits.max_dollars)
    models = connect_all(recipe.models, budget=budget, policy=policy_model)
    sandbox = LazySandbox(recipe.sandbox)
    context: dict[str, Any] = {
        "task": task,
        "judge": models.get("judge"),
        "tokenizer": tokenizer,
        "models": models,
        "sandbox": sandbox,
    }
    named = recipe.reward.manager
    context["manager"] = managers.create(named.name, named.options, "reward.manager", **context)
    names = [metric.name for metric in recipe.reward.metrics]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"reward.metrics names '{name}' twice")
    metrics = {m.name: build_metric(m.name, m.options, "reward.metrics", **context) for m in recipe.reward.metrics}
    weights = {m.name: Weighted(m.weight, m.clamp, metrics[m.name].intrinsic) for m in recipe.reward.metrics}
    user = _user(recipe, task, context)
    return Company(task, models, user, metrics, weights, budget, context["manager"], [sandbox])


async def check_helpers(recipe: Recipe, task: Task, tokenizer: Any) -> None:
    """Refuse what would fail only after the warm start: helpers without key or endpoint, a user without model.

    Models in this process are left alone: loading them takes long.
    """
    company = assemble(recipe, task, _Unheard(), tokenizer)
    for model in dict.fromkeys(company.models.values()):
        if not isinstance(model, BorrowedModel):
            async with model:
                pass


class _Unheard(Model):
    """Stands in for the policy where nobody asks it."""

    name = "policy"

    async def generate(self, request: Request) -> list[Completion]:
        """Never called."""
        raise NotImplementedError


def make_scene(recipe: Recipe, company: Company, policy: Policy) -> Scene:
    """How the conversations of a step are played and scored."""
    overlong, malformed = recipe.reward.overlong, recipe.reward.malformed
    return Scene(
        policy=policy,
        metrics=company.metrics,
        weights=company.weights,
        environment=company.task.environment(),
        max_turns=recipe.episode.max_turns,
        user=company.user,
        samples=recipe.futures.samples,
        window=recipe.futures.window,
        overlong=ReplyRule(overlong.rule, overlong.penalty),
        malformed=ReplyRule(malformed.rule, malformed.penalty),
    )


def sampling_of(recipe: Recipe) -> Sampling:
    """How the policy samples while training."""
    episode = recipe.episode
    return Sampling(episode.max_tokens, episode.temperature, episode.top_p, episode.top_k)


def _user(recipe: Recipe, task: Task, context: Mapping[str, Any]) -> Participant | None:
    named = recipe.futures.user
    if named is not None:
        return users.create(named.name, named.options, "futures.user", **context)
    user = task.user()
    if user is None and recipe.futures.window:
        raise UserError(
            f"futures.window is {recipe.futures.window}, but task '{task.name}' has no user; set futures.user"
        )
    return user


class LazySandbox:
    """Connects to the sandbox when the first program is to be run, so that other runs start none."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._runner: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._runner is None:
            from upshot.sandbox import connect

            self._runner = connect(self.spec)
        return getattr(self._runner, name)

    async def aclose(self) -> None:
        """Stop the sandbox if it was started."""
        if self._runner is not None:
            await self._runner.aclose()
