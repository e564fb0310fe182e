"""Everybody but the policy, put together once for training, evaluation, data building, the API and cluster workers.

No torch here: models in this process are loaded only when they are started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import AgentConfig, MetricConfig, Named, Recipe
from upshot.config.trust import check_trust
from upshot.core.errors import UserError, close_all
from upshot.core.helper import Helper
from upshot.models.base import Model
from upshot.models.client.budget import Budget
from upshot.models.client.guarded import GuardedModel
from upshot.models.client.usage import watch
from upshot.models.connect import connect_all
from upshot.models.rendering import Renderer
from upshot.rewards.build import build_metric, metric_labels
from upshot.rewards.credit import MetricWeight
from upshot.rewards.metric import Metric
from upshot.rewards.workers.base import Manager, managers
from upshot.rollout.agents.check import check_agent
from upshot.rollout.agents.runner import AgentRunner
from upshot.rollout.dependencies import Dependencies, FutureDependencies
from upshot.rollout.episode import Policy
from upshot.rollout.futures.classmates.map_file import read_map
from upshot.rollout.futures.talk import Futures, kinds
from upshot.rollout.play import ReplyRule, RolloutContext
from upshot.sandbox.connection import connect as connect_sandbox
from upshot.serving.servers.state import with_addresses
from upshot.tasks.base import Task
from upshot.tasks.participants.base import Participant, users
from upshot.tasks.participants.dual import with_tools
from upshot.tasks.verifiers.profile_store import VerdictMode, Verdicts, profiles_of

Spec = str | Mapping[str, Any] | ModelSpec
"""What `connect` takes for a model."""


@dataclass
class Services:
    """Task, helper models, user, metrics, sandbox: started and closed together."""

    task: Task | None
    models: dict[str, Model]
    user: Participant | None
    metrics: dict[str, Metric]
    weights: dict[str, MetricWeight]
    budget: Budget
    dependencies: Dependencies
    """What is handed to whatever else is built (futures)."""
    closers: list[Any] = field(default_factory=list)
    """What else was opened here and is closed with the rest: models, the sandbox."""
    futures: Futures | None = None
    agent: AgentRunner | None = None
    """Whose program plays the episodes."""
    held_out: Services | None = None
    """The same with a judge of its own, for held-out rows (`eval.judge`); None: these judge them, too."""
    _watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Check keys and endpoints, load what must be loaded, before any work."""
        for model in dict.fromkeys(self.models.values()):
            if model in self.closers:
                await model.start()
        for services in self._sets:
            if services.futures is not None:
                await services.futures.start()
        if self._watch is None:
            guarded = [model for model in dict.fromkeys(self.models.values()) if isinstance(model, GuardedModel)]
            self._watch = asyncio.create_task(watch(lambda: [m.meter for m in guarded if m.may_be_silent]))

    @property
    def _sets(self) -> list[Services]:
        return [self] if self.held_out is None else [self, self.held_out]

    def stats(self) -> dict[str, float]:
        """Calls, cost, latency and quality of everybody, for the metrics; keys with times start with time/."""
        out: dict[str, float] = {}
        for model in dict.fromkeys(self.models.values()):
            names = [name for name, other in self.models.items() if other is model]
            for key, value in model.stats().items():
                role = key.partition("/")[0]  # roles that share an endpoint are counted once, each under its own name
                name = role if role in names else names[0]
                by_chance = any(word in key for word in ("latency", "replica"))  # other in each run
                out[f"{'time/' if by_chance else ''}model/{name}/{key}"] = value
        for name, helper in self.helpers()[len(self.models) :]:
            for key, value in helper.stats().items():
                # Forks depend on the machine and on how often the run was resumed.
                out[f"{'time/' if key == 'verifier_forks' else ''}{name}/{key}"] = value
        return out

    def counters(self) -> dict[str, Any]:
        """The counters behind `stats`, to be saved with the run."""
        return {name: helper.state() for name, helper in self.helpers()}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Go on counting where the saved run stopped."""
        for name, helper in self.helpers():
            if name in counters:
                helper.restore(counters[name])

    def helpers(self) -> list[tuple[str, Helper]]:
        """Who may have counters, by the names under which these are saved."""
        others: list[tuple[str, Any]] = [("user", self.user), ("manager", self.manager), ("futures", self.futures)]
        models = [(f"model/{name}", model) for name, model in self.models.items()]
        return [*models, *((name, helper) for name, helper in others if helper is not None)]

    @property
    def manager(self) -> Manager:
        """Where verifiers run."""
        assert self.dependencies.manager is not None
        return self.dependencies.manager

    async def aclose(self) -> None:
        """Release everything; what fails to close does not keep the rest open."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        built = [thing for one in self._sets for thing in (one.futures, *one.metrics.values())]
        managers = [one.manager for one in self._sets]
        await close_all(dict.fromkeys([self.agent, *built, self.user, self.task, *self.closers, *managers]))

    async def __aenter__(self) -> Services:
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def assemble(
    task: Task | None,
    models: Mapping[str, Spec | Model],
    metrics: Sequence[MetricConfig] = (),
    *,
    user: Named | Participant | None = None,
    manager: Named | None = None,
    sandbox: Any = "local",
    verdict: VerdictMode = "profile",
    profiles: Path | None = None,
    budget: Budget | None = None,
    policy: Model | None = None,
    tokenizer: Any = None,
    pool: Any = None,
    where: str = "",
) -> Services:
    """Everybody by name, not yet started. `Model`, `Participant`, sandbox and pool objects stay their owner's.

    profiles: the file of row profiles; None: the one beside the task's data.
    """
    prefix = f"{where}." if where else ""
    budget = budget or Budget()
    specs = {role: spec for role, spec in models.items() if not isinstance(spec, Model)}
    opened = connect_all(specs, budget=budget, policy=policy, pool=pool)
    named = {role: spec if isinstance(spec, Model) else opened[role] for role, spec in models.items()}
    if sandbox == "subprocess":  # programs of models and of data rows, with nothing around them
        check_trust(sandbox, "a sandbox that isolates nothing", "sandbox")
    runner = connect_sandbox(sandbox) if isinstance(sandbox, str) else sandbox
    verdicts = Verdicts(verdict, profiles or profiles_of(task))
    known = _with_manager(Dependencies(task, named.get("judge"), tokenizer, named, runner, verdicts), manager, prefix)
    built = _build_metrics(metrics, f"{prefix}metrics", known)
    weights = {
        label: MetricWeight(config.weight, config.clamp, metric.intrinsic, config.tokens)
        for config, (label, metric) in zip(metrics, built.items(), strict=True)
    }
    if isinstance(user, Named):
        user = users.create(user.name, user.options, f"{'futures.' if where else ''}user", **known.by_name())
    if user is not None and task is not None:
        user = with_tools(user, task.environment())
    closers = [*dict.fromkeys(opened.values()), *([runner] if isinstance(sandbox, str) else [])]
    return Services(task, named, user, built, weights, budget, known, closers)


def _with_manager(known: Dependencies, manager: Named | None, prefix: str) -> Dependencies:
    """The same, and where verifiers run; a manager is built without one: its verifiers may name everything else."""
    chosen = manager or Named(name="inline")
    others = {name: value for name, value in known.by_name().items() if name != "manager"}
    return replace(known, manager=managers.create(chosen.name, chosen.options, f"{prefix}manager", **others))


def _build_metrics(configs: Sequence[MetricConfig], where: str, known: Dependencies) -> dict[str, Metric]:
    built: dict[str, Metric] = {}
    labels = metric_labels(config.name for config in configs)
    for config in configs:
        if labels[config.name] in built:
            raise UserError(f"{where} names '{config.name}' twice")
        built[labels[config.name]] = build_metric(config.name, config.options, where, **known.by_name())
    return built


def build_services(
    recipe: Recipe,
    task: Task,
    policy: Model,
    tokenizer: Any = None,
    renderer: Renderer | None = None,
    pool: Any = None,
    budget: Budget | None = None,
) -> Services:
    """Everybody that a recipe names; `pool`: where models in this process take turns (`pool.Pool`).

    budget: what the helpers may cost, instead of the recipe's own limits.
    """
    limits = recipe.budget
    named = recipe.futures.user
    user = named if named is not None else task.user()
    rounds = recipe.futures.rounds
    if user is None and rounds:
        raise UserError(f"futures.rounds is {rounds}, but task '{task.name}' has no user; set futures.user")
    environment = task.environment()
    if rounds and environment is not None and environment.answers_calls() and not environment.forks:
        raise UserError(
            f"futures.rounds is {rounds}, but the tools of task '{task.name}' cannot be copied with"
            " their session; set futures.rounds=0, or task.shared=true where the server remembers nothing"
        )
    if user is None and recipe.episode.with_user:
        raise UserError(f"episode.with_user is set, but task '{task.name}' has no user; set futures.user")
    agent = task.agent()
    if recipe.episode.agent is not None or agent is not None:
        check_agent(recipe)
    elif recipe.episode.max_turns > 1 and not recipe.episode.with_user and environment is None:
        raise UserError(
            f"episode.max_turns is {recipe.episode.max_turns}, but task '{task.name}' has no environment that answers "
            "between the turns; set episode.max_turns=1, or episode.with_user where a simulated user is to answer"
        )
    futures, models = recipe.futures, recipe.needed_models
    if futures.map_file is not None:
        served, classmates = read_map(futures.map_file)
        models = {**served, **models}  # a recipe may say more of a model that the map names
        futures = futures.model_copy(update={"classmates": classmates})
    models = with_addresses(recipe.serve, models)
    services = assemble(
        task,
        models,
        recipe.reward.metrics,
        user=user,
        manager=recipe.reward.manager,
        sandbox=recipe.sandbox,
        verdict=recipe.verdict,
        budget=budget or Budget(limits.max_calls, limits.max_tokens, limits.max_dollars),
        policy=policy,
        tokenizer=tokenizer,
        pool=pool,
        where="reward",
    )
    if recipe.eval.judge is not None:  # everybody as they are, but metrics and verifiers ask another judge
        judged = replace(services.dependencies, judge=services.models[recipe.eval.judge])
        judged = _with_manager(judged, recipe.reward.manager, "reward.")
        others = _build_metrics(recipe.reward.metrics, "reward.metrics", judged)
        services.held_out = replace(services, metrics=others, dependencies=judged, closers=[])
    for one in services._sets:
        known = FutureDependencies(
            **one.dependencies.by_name(),
            metrics=one.metrics,
            weights=one.weights,
            user=one.user,
            credit=recipe.credit,
            renderer=renderer,
            seed=recipe.seed,
            with_user=recipe.episode.with_user,
        )
        one.futures = kinds.create(futures.name, futures.options, "futures", **known.for_futures())
    if recipe.episode.agent is not None:
        services.agent = AgentRunner(recipe.episode.agent, tokenizer)
    elif agent is not None:
        services.agent = AgentRunner(AgentConfig(program=f"task {task.name}"), tokenizer, agent)
    return services


def build_context(recipe: Recipe, services: Services, policy: Policy) -> RolloutContext:
    """How the conversations of a step are played and scored."""
    overlong, malformed = (ReplyRule(of.rule, of.penalty) for of in (recipe.reward.overlong, recipe.reward.malformed))
    assert services.futures is not None and services.task is not None
    environment = services.user if recipe.episode.with_user else services.task.environment()
    answers_both = recipe.episode.with_user or (services.user is not None and services.user.answers_calls())
    hear_last = not (answers_both and recipe.futures.rounds)
    others = (environment, services.user, services.agent)
    return RolloutContext(policy, services.futures, *others, recipe.episode.max_turns, hear_last, overlong, malformed)


def build_held_out(recipe: Recipe, services: Services, context: RolloutContext) -> RolloutContext:
    """The same for held-out rows: at the temperature of evaluation, scored by its judge."""
    futures = (services.held_out or services).futures
    assert futures is not None
    return replace(context, policy=context.policy.at(recipe.eval.temperature), futures=futures)
