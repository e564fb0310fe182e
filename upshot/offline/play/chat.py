"""A chat with a model, played as in training: you or the simulated user speak, replies are forked and scored.

This file has the commands of a session; `terminal.py` reads and prints. The same context as in a training step plays
everything, so `/fork` scores a reply exactly as training would.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from upshot.config.load import read_value
from upshot.core.conversation import Conversation, Message, Row, Turn
from upshot.core.errors import UserError
from upshot.core.files import append_jsonl
from upshot.core.score import Score
from upshot.core.time_limit import limit_call
from upshot.rewards.metric import Metric, VerifierMetric, score_conversation
from upshot.rollout.play import RolloutContext, play_reply
from upshot.rollout.reply import Rollout
from upshot.tasks.participants.base import Participant

NO_GOAL = "the simulated user needs a goal: give one with /goal TEXT, or chat with a run or --recipe that has goals"
NO_REFERENCE = "the verifier compares with a reference, and your words have none: give it with /reference TEXT"


class Chat:
    """One conversation after another; each command returns what to show."""

    def __init__(
        self,
        context: RolloutContext,
        metrics: Mapping[str, Metric],
        user: Participant | None,
        rows: Sequence[Row],
        system: str,
        seed: int,
    ) -> None:
        """rows: their goals are the simulated user's, one after another."""
        self.context, self.metrics, self.user, self.rows = context, metrics, user, rows
        self.system, self.seed = system, seed
        self._begun = self._rows = 0
        self.restart()

    def restart(self, row: Row | None = None) -> None:
        """Start a new conversation, with the facts of a row or without any."""
        row = row or Row("chat", ())
        self._begun += 1
        self.forks: list[Rollout] = []
        """The replies of the last /fork."""
        if self.system and not any(message.role == "system" for message in row.messages):
            row = replace(row, messages=(Message("system", self.system), *row.messages))
        self.conversation = Conversation(row, self.seed + self._begun, f"chat#{self._begun}")

    def set_fact(self, name: str, value: str) -> None:
        """Set the goal or the reference of the conversation; it must have the same type as in the task's rows."""
        fact: Any = value
        example = next((getattr(row, name) for row in self.rows), None)
        if isinstance(example, Mapping):
            fact = read_value(f"/{name}", value)
            if not isinstance(fact, Mapping) or set(fact) != set(example):
                raise UserError(f"/{name}: expected one like {json.dumps(dict(example), default=str)}")
        self.conversation.row = replace(self.conversation.row, **{name: fact})

    def say(self, text: str) -> None:
        """Your words."""
        self.conversation.say(Message("user", text))

    async def hear_user(self) -> list[Message]:
        """Let the simulated user speak instead of you; if it leaves, the conversation has ended."""
        user = self.user
        if user is None:
            raise UserError("there is no simulated user here: name the model that plays it with --user, or --recipe")
        if self._lacks_goal():
            opening = self._take_row()
            if any(message.role == "user" for message in opening):
                return opening
        talk, before = self.conversation, len(self.conversation.turns)
        if self._user_spoke():
            observation = await limit_call(user, user.observe, talk)
            talk.count(observation.metrics)
            for message in observation.messages:
                talk.say(message, note=observation.note)
            if observation.done:
                talk.ended = observation.reason
        else:
            await limit_call(user, user.start, talk)
        heard = [turn.message for turn in self.conversation.turns[before:]]
        if not heard and talk.ended is None:
            talk.ended = "nothing said"
        return heard

    def _user_spoke(self) -> bool:
        return any(turn.message.role == "user" for turn in self.conversation.turns)

    def _lacks_goal(self) -> bool:
        return self.conversation.row.goal is None and not self.conversation.row.meta.get("script")

    def _take_facts(self) -> None:
        """Get what a score needs besides your words: a goal for the simulated user; a missing reference is refused."""
        rows = self.rows
        if self.user is not None and rows and self._lacks_goal():
            self._take_row()
        verified = any(isinstance(metric, VerifierMetric) for metric in self.metrics.values()) and rows
        if verified and rows[0].reference is not None and self.conversation.row.reference is None:
            raise UserError(NO_REFERENCE)

    def _take_row(self) -> list[Message]:
        """Take the next goal from the task's rows; at the start of the conversation, also its row's opening."""
        if not self.rows:
            raise UserError(NO_GOAL)
        row = self.rows[self._rows % len(self.rows)]
        self._rows += 1
        if self._user_spoke():
            self.conversation.row = replace(row, messages=self.conversation.row.messages)
            return []
        self.restart(row)
        return [turn.message for turn in self.conversation.turns if turn.message.role != "system"]

    async def fork(self, n: int) -> list[Rollout]:
        """`n` replies instead of the last one (or to the last message), each with its futures and its reward."""
        if not self._user_spoke():
            raise UserError("there is nothing to reply to yet")
        self._take_facts()
        before = self.conversation.fork("again", len(self.conversation.turns))
        before.ended = None
        while before.turns and before.turns[-1].message.role != "user":
            before.turns = before.turns[:-1]
        one_reply = replace(self.context, max_turns=1, environment=None)
        twins = [before.fork("fork", self._begun, index) for index in range(n)]
        self.forks = list(await asyncio.gather(*(play_reply(one_reply, twin) for twin in twins)))
        return self.forks

    def take(self, number: int) -> Turn:
        """Continue with one of the forked replies."""
        if not 1 <= number <= len(self.forks):
            raise UserError(f"there is no reply {number}; /fork N makes some, numbered from 1")
        chosen = self.forks[number - 1].conversation
        self.conversation.turns = chosen.turns
        self.conversation.ended = None
        return chosen.turns[-1]

    async def score(self) -> dict[str, Score]:
        """Every metric of the conversation as it stands."""
        if self.conversation.last("assistant") is None:
            raise UserError("there is no reply to score yet")
        if not self.metrics:
            raise UserError("there are no metrics here: give --metrics, or chat with a run or --recipe")
        self._take_facts()
        return await score_conversation(self.metrics, self.conversation)

    def save(self, path: Path) -> None:
        """Append the conversation to a JSONL file that `upshot score` and `upshot data prepare` read."""
        row = self.conversation.row
        facts = {name: value for name, value in (("goal", row.goal), ("reference", row.reference)) if value is not None}
        messages = [turn.message.to_dict() for turn in self.conversation.turns]
        append_jsonl(path, [json.loads(json.dumps({"messages": messages, **facts}, default=str))])

    def thought(self) -> str:
        """The thought of the last reply; '' if it had none."""
        replies = [turn for turn in self.conversation.turns if turn.message.role == "assistant"]
        return str(replies[-1].note.get("thought", "")) if replies else ""

    async def reply(self) -> Turn:
        """The model's reply to the last message."""
        turn = await self.context.policy.reply(self.conversation)
        if turn is None:
            raise UserError("the conversation fills the model's context; start another with /new")
        return turn
