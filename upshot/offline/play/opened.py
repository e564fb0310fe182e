"""Opens a recipe without training: a model as the policy, and everybody else that the recipe names.

Used by `upshot rollout`, `chat`, `eval RECIPE` and the dry run's trial; it plays exactly what training plays.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshot.config.load import find_recipe
from upshot.config.recipe import Recipe
from upshot.core.conversation import Row, derive_seed
from upshot.core.errors import UserError
from upshot.core.time_limit import call_seconds
from upshot.models.base import Completion, Model, Request
from upshot.models.client.budget import Budget
from upshot.models.connect import connect
from upshot.models.endpoint import EndpointModel
from upshot.models.engine_model import EngineModel
from upshot.models.rendering import Renderer, policy_renderer
from upshot.offline.arguments import read_model
from upshot.rollout.episode import Policy
from upshot.rollout.play import RolloutContext
from upshot.rollout.services import Services, Spec, build_context, build_services
from upshot.serving.openai.stream import GrowingText
from upshot.tasks.base import Task, tasks
from upshot.training.setup import load_policy, sampling_of

Hear = Callable[[str], None]
"""Receives pieces of what the policy says as they arrive."""


@dataclass(frozen=True)
class OpenedRecipe:
    """Everything that plays a recipe's conversations, already started."""

    recipe: Recipe
    task: Task
    services: Services
    context: RolloutContext


class StandingPolicy(Model):
    """A policy that does not learn: every copy of it is itself. Its words can be streamed."""

    def __init__(self, inner: Model) -> None:
        self.inner = inner
        self.name = inner.name
        self.abilities = inner.abilities
        self.tokenizer = inner.tokenizer
        self.hear: Hear | None = None
        """Receives the stream of calls with the role 'policy'; None: nobody listens."""

    @property
    def engine(self) -> EngineModel | None:
        """The engine's model behind this one; None if it is another kind of model."""
        engine = getattr(self.inner, "inner", self.inner)
        return engine if isinstance(engine, EngineModel) else None

    def copy_at(self, when: str) -> Model:
        """Itself: it never changes."""
        return self

    async def generate(self, request: Request) -> list[Completion]:
        """Generate with the model behind this one; streamed piece by piece if possible, else in one piece."""
        hear = self.hear if request.role == "policy" and request.n == 1 else None
        if hear is None:
            return await self.inner.generate(request)
        if (engine := self.engine) is not None:
            growing, ends = GrowingText(engine.tokenizer, request.sampling.stop), engine.end_ids

            def on_token(_: Any, token: int, __: float) -> None:
                if token not in ends:
                    hear(growing.add(token))

            return await engine.generate(request, on_token)
        if isinstance(self.inner, EndpointModel) and not request.by_ids:
            return [await self.inner.stream(request, hear)]
        completions = await self.inner.generate(request)
        hear(completions[0].text)
        return completions

    def stats(self) -> dict[str, float]:
        """The counters of the model behind this one."""
        return self.inner.stats()

    async def aclose(self) -> None:
        """Release the model behind this one."""
        await self.inner.aclose()


def with_policy(recipe: Recipe, checkpoint: Path) -> Recipe:
    """The recipe with one of its checkpoints as the model."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(checkpoint)})})


async def start_policy(
    recipe: Recipe, task: Task, spec: Spec | None = None, budget: Budget | None = None
) -> tuple[StandingPolicy, Renderer | None]:
    """The policy: the model of a spec, or else the recipe's own before any training."""
    if spec is not None:
        budget = budget or Budget(max_dollars=recipe.budget.max_dollars)
        model = connect(read_model(spec), role="policy", budget=budget)
        await model.start()
        renderer = policy_renderer(model.tokenizer, recipe) if model.tokenizer is not None else None
        return StandingPolicy(model), renderer
    from upshot.engine.engine import Engine

    module, tokenizer = load_policy(recipe.model, task, derive_seed(recipe.seed, "weights"))
    renderer = policy_renderer(tokenizer, recipe)
    return StandingPolicy(EngineModel(Engine(module, renderer.end_ids), tokenizer, "policy", renderer)), renderer


@asynccontextmanager
async def open_recipe(
    recipe: Recipe, spec: Spec | None = None, budget: Budget | None = None
) -> AsyncIterator[OpenedRecipe]:
    """Load and start everybody; closed again at the end.

    spec: the policy; None: the recipe's own model, before any training. budget: replaces the recipe's.
    """
    call_seconds.set(recipe.call_seconds)
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    policy, renderer = await start_policy(recipe, task, spec, budget)
    async with aclosing(policy):
        services = build_services(recipe, task, policy, policy.tokenizer, renderer, budget=budget)
        episode, engine = recipe.episode, policy.engine
        room = recipe.model.max_context or (engine.engine.shape.max_length if engine is not None else 0)
        speaker = Policy(policy, renderer, sampling_of(recipe), room, episode.system, task.tools(), episode.think)
        async with services:
            yield OpenedRecipe(recipe, task, services, build_context(recipe, services, speaker))


def held_out(task: Task, split: str | None, most: int | None = None) -> list[Row]:
    """Rows that were not trained on: those of the named split, or else of test, or else of validation."""
    wanted = split or "test or validation"
    problem = UserError(f"task '{task.name}' has no rows in its split {wanted}; choose another --split")
    for name in [split] if split else ["test", "validation"]:
        try:
            if rows := list(task.rows(name))[:most]:
                return rows
        except UserError as error:  # the task has no such split, or its data cannot be read
            problem = error
    raise problem


def recipe_of_run(name: str) -> bool:
    """Whether a name is a run folder, which stands for its own recipe and its best checkpoint."""
    with suppress(UserError):
        return find_recipe(name).parent.joinpath("checkpoints").is_dir()
    return False
