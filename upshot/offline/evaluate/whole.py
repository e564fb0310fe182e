"""Whole conversations on held-out goals: every model meets the same users, who open with the same words.

A finished conversation is a line of `rollouts.jsonl` (fsync'd), an opening a line of `openings.log`: a stopped
evaluation goes on behind them, and plays again what failed. What fails is a conversation without scores, with the
reason; it is never a zero.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from upshot.api.scorer import first_of
from upshot.core.conversation import Conversation, Message, Row, Turn, derive_seed
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.core.time_limit import limit_call
from upshot.offline.data.journal import Journal
from upshot.offline.data.outage import Outage
from upshot.rewards.reward import combine
from upshot.rollout.episode import first_reply
from upshot.rollout.play import describe_failure, score_conversation
from upshot.rollout.policy import Policy
from upshot.rollout.rollout import reward_to_dict, turn_to_dict
from upshot.rollout.services import Services
from upshot.tasks.base import groups_of
from upshot.tasks.collabllm import CollabTask
from upshot.tasks.datasets.splits import fingerprint, goal_key
from upshot.tasks.participants.base import Participant, count


async def play_whole(conversation: Conversation, policy: Policy, user: Participant | None, max_messages: int) -> None:
    """Let policy and user talk until the user leaves or `max_messages` are said; the last word is the policy's."""
    await first_reply(conversation, policy)
    while True:
        said = sum(message.role != "system" for message in conversation.messages)
        if user is None or said + 2 > max_messages:
            conversation.ended = "messages"
            return
        observation = await limit_call(user, user.observe, conversation)
        count(conversation, observation.metrics)
        for message in observation.messages:
            conversation.say(message, note=observation.note)
        if observation.done:
            conversation.ended = observation.reason
            return
        if await policy.reply(conversation) is None:
            return


def whole_goals(task: CollabTask, rows: Sequence[Row]) -> list[Row]:
    """Each goal once, before anything is said by anybody but the user; system prompts are the models' own."""
    goals: dict[str, Row] = {}
    for row in rows:
        goals.setdefault(goal_key(row), row)
    return [
        replace(
            row,
            id=f"{task.name}/{fingerprint(key)}",
            messages=() if task.user_opens else tuple(m for m in row.messages if m.role != "system"),
        )
        for key, row in goals.items()
    ]


@dataclass(frozen=True)
class Evaluation:
    """Plays and scores every goal with every model."""

    task: CollabTask
    services: Services
    policies: Mapping[str, Policy]
    """By the name of the table's row."""
    speakers: Mapping[str, str]
    """Who each of them is, for the record."""
    max_messages: int
    seed: int
    concurrency: int

    async def run(
        self, rows: Sequence[Row], openings: Journal, rollouts: Journal, told: Callable[[dict[str, Any]], None]
    ) -> None:
        """Bring all conversations that are not in the journals yet to their end."""
        opened = {line["row"]: line for line in openings.lines}
        done = {line["key"] for line in rollouts.lines}
        gate = asyncio.Semaphore(self.concurrency)
        outage = Outage("conversations")

        async def goal(row: Row) -> None:
            missing = [name for name in self.policies if key_of(row, name) not in done]
            if not missing:
                return
            async with gate:
                if row.id not in opened:
                    opened[row.id] = await self._open(row)
                    if opened[row.id]["missing"] is None:  # one that failed is asked for again by another run
                        openings.append(opened[row.id])
            async with asyncio.TaskGroup() as tasks:
                for name in missing:
                    tasks.create_task(one(row, name))

        async def one(row: Row, name: str) -> None:
            async with gate:
                line = await self._play(row, name, opened[row.id])
            rollouts.append(line)
            told(line)
            outage.heard(line["missing"])

        try:
            async with asyncio.TaskGroup() as tasks:
                for row in rows:
                    tasks.create_task(goal(row))
        except ExceptionGroup as group:
            raise first_of(group) from group

    async def _open(self, row: Row) -> dict[str, Any]:
        """What the user opens with: the same for every model."""
        conversation = Conversation(row, derive_seed(self.seed, row.id))
        line: dict[str, Any] = {"row": row.id, "missing": None}
        if not any(message.role == "user" for message in row.messages):
            if self.services.user is None:
                raise UserError(f"task '{self.task.name}' needs --user: somebody must open the conversation")
            try:
                await limit_call(self.services.user, self.services.user.start, conversation)
            except UserError:
                raise
            except Exception as error:  # this goal is missing, with the reason; the others go on
                line["missing"] = f"opening: {describe_failure(error)}"
        if line["missing"] is None and (conversation.last("user") is None or conversation.ended):
            line["missing"] = "opening: the user left at once"
        line["turns"] = [{**turn.message.to_dict(), "note": dict(turn.note)} for turn in conversation.turns]
        line["session"] = conversation.session
        return line

    async def _play(self, row: Row, name: str, opening: Mapping[str, Any]) -> dict[str, Any]:
        """One whole conversation and its scores, as a line of `rollouts.jsonl`."""
        turns = tuple(Turn(Message(t["role"], t["content"]), note=t["note"]) for t in opening["turns"])
        conversation = Conversation(row, derive_seed(self.seed, row.id), key_of(row, name), turns)
        conversation.session = copy.deepcopy(dict(opening["session"]))
        missing = opening["missing"]
        if missing is None:
            missing = await self._talk(conversation, name)
        if missing is None:
            scores = await score_conversation(self.services.metrics, conversation)
        else:
            reason = Reason.read(missing.removeprefix("opening: "), Reason.ERROR)
            scores = dict.fromkeys(self.services.metrics, Score.missing(reason, f"conversation: {missing}"))
        return {
            "step": 0,
            "row": row.id,
            "key": conversation.key,
            "model": name,
            "speaker": self.speakers[name],
            "messages": [{"note": {}, **turn_to_dict(turn, trained=False)} for turn in conversation.turns],
            "ended": conversation.ended,
            "missing": missing,
            "futures": [],
            "reward": reward_to_dict(combine([scores], self.services.weights)),
            "scores": {metric: score.to_dict() for metric, score in scores.items()},
            "metrics": dict(conversation.session.get("metrics", {})),
            "groups": {"model": name, **groups_of(self.task, row)},
            "spent": self.services.budget.state(),
        }

    async def _talk(self, conversation: Conversation, name: str) -> str | None:
        """Play it; the reason when it failed."""
        try:
            await play_whole(conversation, self.policies[name], self.services.user, self.max_messages)
        except UserError:
            raise
        except Exception as error:  # one conversation's failure stays its own
            return describe_failure(error)
        return None


def key_of(row: Row, model: str) -> str:
    """The name of a model's conversation about a goal."""
    return f"{row.id}@{model}"
