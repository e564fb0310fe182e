"""All participants of a recipe in one process of the cluster: set up once, they serve all conversations there.

Nothing here imports verl; the policy is whatever model the `ConversationLink` of a conversation leads to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import Recipe
from upshot.core.conversation import Row, derive_seed
from upshot.core.time_limit import call_seconds
from upshot.models.base import Model
from upshot.models.connect import share_endpoints
from upshot.models.local import LocalModel
from upshot.models.rendering import policy_renderer
from upshot.rollout.episode import Policy
from upshot.rollout.play import Opening, RolloutContext, open_row, play_reply
from upshot.rollout.prompt_length import build_prompt_filter
from upshot.rollout.reply import Rollout
from upshot.rollout.services import build_context, build_held_out, build_services
from upshot.tasks.base import tasks
from upshot.training.setup import sampling_of
from upshot.verl.budget import BudgetClient, WorkerBudget
from upshot.verl.rows import RowIndex
from upshot.verl.served import ConversationLink, ServedModel, use_link


@dataclass(frozen=True)
class PlayRequest:
    """One conversation to play, as the cluster requests it."""

    extra_info: Mapping[str, Any]
    """Split and id of the row (`rows.py`), and its place in a training step (`describe_place`)."""
    session: int
    """Which of the replies to the prompt this is."""
    step: int
    """The step, counted from 0 as in local mode."""

    @property
    def trains(self) -> bool:
        """Whether it is played for training; nothing else in the request says so."""
        return self.extra_info["split"] == "train"

    @property
    def group(self) -> int:
        """The place of the row in the step; for a held-out row, its place in the file."""
        return int(self.extra_info["group"] if self.trains else self.extra_info["index"])

    @property
    def number(self) -> int:
        """How often the row occurred in the step before this."""
        return int(self.extra_info["earlier"]) if self.trains else 0

    def seed(self, seed: int) -> int:
        """The seed of the request's round, derived from the recipe's seed."""
        if not self.trains:
            return derive_seed(seed, "eval")
        again = int(self.extra_info["round"])
        return derive_seed(seed, "step", self.step, *([again] if again else []))


def describe_place(extra_info: Mapping[str, Any], group: int, earlier: int, again: int = 0) -> dict[str, Any]:
    """The fields of a request for a training row: its place in the step, earlier occurrences, and the round."""
    return {**extra_info, "group": group, "earlier": earlier, "round": again}


class RolloutWorker:
    """Plays the conversations that verl asks for. Start it before the first, close it after the last."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Any,
        max_context: int = 0,
        client: BudgetClient | None = None,
        name: str = "",
        workers: int = 1,
        borrow: Callable[[ModelSpec], Awaitable[Model]] | None = None,
    ) -> None:
        """`client`: the run's budget; None: this worker has its own. `workers`: how many workers share it.

        `borrow`: gets the helper models that the workers of a node share; None: this worker loads its own.
        """
        self.recipe = recipe
        self.renderer = policy_renderer(tokenizer, recipe)
        task = tasks.create(recipe.task.name, recipe.task.options, "task")
        context = recipe.model.max_context or max_context
        self.lengths = build_prompt_filter(recipe, task, self.renderer, context)
        self.rows = RowIndex(task, self.lengths)
        served = ServedModel(self.renderer)
        self.services = build_services(recipe, task, served, tokenizer, self.renderer)
        episode, sampling = recipe.episode, sampling_of(recipe)
        policy = Policy(served, self.renderer, sampling, context, episode.system, task.tools(), episode.think)
        self.context = build_context(recipe, self.services, policy)
        self.held_out = build_held_out(recipe, self.services, self.context)
        self.name = name
        share_endpoints(self.services.models.values(), workers)
        for model in self.services.models.values():
            if isinstance(model, LocalModel):
                model.borrow = borrow
        self.budget = None if client is None else WorkerBudget(name, client, self.services.budget)
        self._gate = asyncio.Semaphore(self.context.concurrency)
        self._start: asyncio.Task[None] | None = None
        self._openings: dict[tuple[int, int, str], asyncio.Task[Opening]] = {}
        self.played = 0
        """Replies until now."""
        self._closed = False

    async def start(self) -> None:
        """Load and check the helpers, once; concurrent callers wait for it."""
        if self._start is None:
            if self.budget is not None:
                self.budget.start(self.aclose)
            self._start = asyncio.create_task(self.services.start())
        await asyncio.shield(self._start)

    async def play(self, request: PlayRequest, link: ConversationLink) -> Rollout:
        """Play one reply with its futures over a link, and score it, as local mode does, with the same seeds."""
        await self.start()
        row = self.rows.row(request.extra_info)
        call_seconds.set(self.recipe.call_seconds)
        context, seed = self.context if request.trains else self.held_out, request.seed(self.recipe.seed)
        with use_link(link):
            opening = await self._opening(context, row, seed, request.group)
            number = request.session + self.recipe.train.group_size * request.number
            talk = opening.conversation(row, seed, request.group, request.session, number)
            async with self._gate:
                reply = await play_reply(context, talk, request.group, opening.failure)
        self.played += 1
        return reply

    async def _opening(self, context: RolloutContext, row: Row, seed: int, group: int) -> Opening:
        """The opening of the replies to a prompt: played once, because verl plays all of them in one worker."""
        seeds = list(dict.fromkeys(of for of, *_ in self._openings))
        if seed not in seeds and len(seeds) > self.recipe.train.async_steps:  # a new step or round
            self._openings = {key: task for key, task in self._openings.items() if key[0] != seeds[0]}
        key = (seed, group, row.id)
        if key not in self._openings:
            self._openings[key] = asyncio.create_task(open_row(context, row, seed, group))
        return await asyncio.shield(self._openings[key])

    async def aclose(self) -> None:
        """Release the helpers, and then report what they have spent, once."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.services.aclose()
        finally:
            if self.budget is not None:
                await self.budget.aclose()
