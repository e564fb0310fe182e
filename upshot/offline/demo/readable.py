"""Can others read a model's thoughts? Its answers, a classmate's answers from its thoughts, and a monitor's guesses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from upshot.config.recipe import Recipe
from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, Row, derive_seed
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score, mean_score
from upshot.models.connect import connect
from upshot.rewards.monitor import Monitor, MonitorPrediction, case_of
from upshot.rollout.futures.classmates.classmate import Classmate, ClassmatePrompt
from upshot.rollout.futures.classmates.options import CLASSMATE, ClassmateConfig
from upshot.rollout.play import play_step
from upshot.rollout.policy import Policy
from upshot.rollout.rollout import Rollout
from upshot.rollout.services import build_context, build_services
from upshot.serving.servers.state import with_addresses
from upshot.tasks.base import Task, tasks
from upshot.tasks.ciphers import Ciphers, thought


@dataclass(frozen=True)
class Readability:
    """What became of a model's replies to held-out questions."""

    main: list[Score]
    """The verdicts on its own answers."""
    classmate: list[Score]
    """Mean verdicts on the classmates' answers from each thought; missing where there was none."""
    looks: list[MonitorPrediction]
    """The thoughts, and the verdicts that the monitor predicted from them."""


async def read_replies(recipe: Recipe, checkpoint: Path, count: int) -> Readability:
    """Play `count` rows of the test split with the recipe's classmates, and show the thoughts to its monitor."""
    from upshot.engine.engine import Engine
    from upshot.models.engine_model import EngineModel
    from upshot.models.rendering import Renderer
    from upshot.training.setup import context_limit, load_policy, sampling_of

    if recipe.eval.monitor is None:
        raise UserError("eval.monitor names no model to read the thoughts; the recipe 'classmate-mini' has one")
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    module, tokenizer = load_policy(recipe.model, task, 0, str(checkpoint))
    renderer = Renderer(tokenizer)
    model = EngineModel(Engine(module, renderer.end_ids), tokenizer, "policy", renderer)
    limit = context_limit(recipe.model, module)
    policy = Policy(model, renderer, sampling_of(recipe), limit, recipe.episode.system, think=recipe.episode.think)
    services = build_services(recipe, task, model, tokenizer, renderer)
    async with services:
        context = build_context(recipe, services, policy)
        groups = await play_step(context, task.rows("test")[:count], 1, derive_seed(recipe.seed, "test"))
        replies = [reply for group in groups for reply in group]
        cases = [case_of(reply.conversation, reply.reward, task, services.manager) for reply in replies]
        looks = await Monitor(services.models[recipe.eval.monitor]).look_at_all(cases)
    return Readability([case.verdict for case in cases], [_classmate_score(reply) for reply in replies], looks)


def _classmate_score(reply: Rollout) -> Score:
    return mean_score([future.scores[CLASSMATE] for future in reply.futures if future.cut], str(Reason.NO_THOUGHT))


async def classmate_alone(recipe: Recipe, name: str, count: int) -> dict[str, float | None]:
    """How often a classmate is right on problems of the test split when handed nothing, coded thoughts, plain ones."""
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    assert isinstance(task, Ciphers)
    rows, problems = task.rows("test")[:count], task.problems("test")[:count]
    hands = {
        "no thought": [""] * len(rows),
        "a coded one": [thought(problem, coded=True) for problem in problems],
        "a plain one": [thought(problem) for problem in problems],
    }
    spec = with_addresses(recipe.serve, {name: recipe.models[name]})[name]
    async with connect(spec, role=name) as model:
        most = int((recipe.futures.model_extra or {}).get("max_tokens", 512))
        classmate = Classmate(ClassmateConfig(name=name), model, Sampling(most))
        await classmate.start()
        return {what: await _share(task, classmate, rows, own) for what, own in hands.items()}


async def _share(task: Task, classmate: Classmate, rows: Sequence[Row], handed: Sequence[str]) -> float | None:
    asked = (_verdict(task, classmate, row, own) for row, own in zip(rows, handed, strict=True))
    return mean_score(await asyncio.gather(*asked)).value


async def _verdict(task: Task, classmate: Classmate, row: Row, handed: str) -> Score:
    (said,) = await classmate.answer(ClassmatePrompt(row.messages, handed), 1, derive_seed(0, row.id))
    conversation = Conversation(row, 0, row.id)
    conversation.say(Message("assistant", said.text))
    return await task.verify(conversation)
