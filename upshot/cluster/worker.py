"""Everybody of a recipe in one process of the cluster: assembled once, serving all conversations that land there.

Nothing here imports verl; the policy is whatever the `Line` of a conversation leads to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from upshot.chat import Conversation, derive_seed
from upshot.cluster.parquet import Book
from upshot.cluster.served import Line, ServedModel, talking
from upshot.cluster.trajectory import Trajectory, trajectory_of
from upshot.models.rendering import Renderer
from upshot.recipe import Recipe
from upshot.rollout.company import of_recipe, stage_of
from upshot.rollout.play import play_reply
from upshot.rollout.policy import Policy
from upshot.rollout.reply import Reply
from upshot.score import Score
from upshot.tasks.base import tasks
from upshot.time_limit import call_seconds
from upshot.train.setup import sampling_of


@dataclass(frozen=True)
class Order:
    """One conversation to play, as the cluster asks for it."""

    extra_info: Mapping[str, Any]
    """Split and id of the row (`parquet.py`)."""
    raw_prompt: Sequence[Mapping[str, Any]]
    uid: str
    """Of the prompt in this step: its replies share it."""
    session: int
    """Which of the replies to the prompt this is."""
    step: int

    @property
    def trains(self) -> bool:
        """Whether it is played to be learned from; the cluster does not say so otherwise."""
        return self.extra_info["split"] == "train"


class Worker:
    """Plays orders of a recipe. Start it before the first, close it after the last."""

    def __init__(self, recipe: Recipe, tokenizer: Any, max_context: int = 0) -> None:
        self.recipe = recipe
        self.renderer = Renderer(tokenizer, recipe.model.template_options)
        task = tasks.create(recipe.task.name, recipe.task.options, "task")
        self.book = Book(task)
        served = ServedModel(self.renderer)
        self.company = of_recipe(recipe, task, served, tokenizer, self.renderer)
        policy = Policy(
            served,
            self.renderer,
            sampling_of(recipe),
            recipe.model.max_context or max_context,
            recipe.episode.system,
            task.tools(),
            recipe.episode.think,
        )
        self.stage = stage_of(recipe, self.company, policy)
        self.held_out = replace(self.stage, policy=policy.at(recipe.eval.temperature))
        self._gate = asyncio.Semaphore(self.stage.concurrency)
        self._start: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load and check the helpers, once; whoever comes meanwhile waits for it."""
        if self._start is None:
            self._start = asyncio.create_task(self.company.start())
        await asyncio.shield(self._start)

    async def play(self, order: Order, line: Line) -> Reply:
        """Play one reply with its futures over a line, and settle it."""
        await self.start()
        row = self.book.row(order.extra_info, order.raw_prompt)
        seed = derive_seed(self.recipe.seed, "step", order.step, row.id, order.session)
        talk = Conversation(row, seed, key=f"{row.id}#{order.uid}.{order.session}")
        call_seconds.set(self.recipe.call_seconds)
        async with self._gate:
            with talking(line):
                return await play_reply(self.stage if order.trains else self.held_out, talk)

    async def trajectory(self, order: Order, line: Line, prompt: int, response: int) -> Trajectory | Score:
        """What the cluster trains on, or why there is nothing; `prompt` and `response`: most ids of each."""
        reply = await self.play(order, line)
        return trajectory_of(reply, prompt, response, list(self.company.weights))

    async def aclose(self) -> None:
        """Release the helpers."""
        await self.company.aclose()
