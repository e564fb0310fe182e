"""The same recipe with the same replies: local mode and verl mode compute the same rewards, parts and advantages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.test_worker import HALF_SAID, RENDERER, TOKENIZER, Manager, Output, made, order, shopkeeper
from upshot.chat import Conversation, Row
from upshot.cluster.estimate import advantages
from upshot.cluster.served import Line
from upshot.cluster.trajectory import Trajectory
from upshot.models.base import Abilities, Completion, Model, ModelCallError, Request
from upshot.recipe import Recipe
from upshot.rollout.company import of_recipe, stage_of
from upshot.rollout.play import play_reply
from upshot.rollout.policy import Policy
from upshot.rollout.reply import Reply
from upshot.tasks.slots import Slots
from upshot.train.batch import data_of
from upshot.train.rl import set_advantages
from upshot.train.setup import sampling_of

Says = Callable[[str], str]
DOWN = "down"


def down(text: str) -> str:
    return DOWN


REPLIES: list[Says] = [shopkeeper(HALF_SAID), lambda text: "here is a tiny red lamp", down, lambda text: "hello"]


class Fixed(Model):
    """A policy in this process that says what it is told to say."""

    name = "fixed"
    abilities = Abilities(ids_in=True, ids_out=True)

    def __init__(self, says: Says) -> None:
        self.says = says

    async def generate(self, request: Request) -> list[Completion]:
        text = self.says(TOKENIZER.decode(list(request.prompt)))
        if text == DOWN:
            raise ModelCallError("aborted")
        ids = tuple(RENDERER.completed(text))
        return [Completion(text, "stop", ids, (-0.5,) * len(ids))]


class Servers(Manager):
    """The same words from a cluster's servers."""

    async def generate(self, request_id: str, **asked: Any) -> Output:
        if self.says("") == DOWN:
            return Output([], [], "aborted")
        return await super().generate(request_id, **asked)


def locally(recipe: Recipe, row: Row) -> list[Reply]:
    """The group as local mode plays and compares it."""

    async def one(says: Says, index: int) -> Reply:
        model = Fixed(says)
        company = of_recipe(recipe, Slots(rows_per_split=64, vague=0), model, TOKENIZER, RENDERER)
        policy = Policy(model, RENDERER, sampling_of(recipe), 256)
        return await play_reply(stage_of(recipe, company, policy), Conversation(row, index))

    async def group() -> list[Reply]:
        return [await one(says, index) for index, says in enumerate(REPLIES)]

    replies = asyncio.run(group())
    set_advantages([replies], recipe.train.advantage)
    return replies


@pytest.mark.parametrize("estimator", ["dr-grpo", "grpo", "rloo", "gdpo", "reinforce++"])
def test_rewards_parts_and_advantages_are_those_of_local_mode(estimator: str) -> None:
    worker = made(f"train.advantage={estimator}")
    replies = locally(worker.recipe, HALF_SAID)

    async def group() -> list[Any]:
        lines = [Line(Servers(says, TOKENIZER), str(index)) for index, says in enumerate(REPLIES)]
        return [await worker.trajectory(order(HALF_SAID, n), line, 200, 50) for n, line in enumerate(lines)]

    played = asyncio.run(group())
    assert [isinstance(row, Trajectory) for row in played] == [True, True, False, True]
    assert [row.score for row in played if isinstance(row, Trajectory)] == [
        reply.reward.total.value for reply in replies if not reply.reward.total.is_missing
    ]
    rows = [row for row in played if isinstance(row, Trajectory)]
    found = advantages(
        [row.token_scores for row in rows],
        [row.response_mask for row in rows],
        ["u"] * len(rows),
        worker.recipe.train.advantage,
    )
    local = [datum for reply in replies for datum in data_of(reply)]
    assert len(local) == len(rows)
    for row, own, datum in zip(rows, found, local, strict=True):
        first = len(row.prompt_ids)
        assert [*row.prompt_ids, *row.response_ids] == list(datum.ids)
        assert row.response_mask == list(datum.mask)[first:] and row.response_logprobs == list(datum.old)[first:]
        assert own == pytest.approx(list(datum.advantages)[first:])
    assert any(value for own in found for value in own)
