"""`upshot data build`: simulate conversations, try several replies a turn, score them by what comes of them.

The simulated user opens; N candidates answer (a share of them with the proactive prompt); each is scored by its
multiturn-aware reward, its futures being played by the plain policy so that scores compare; the best one stays, and
the next user turn is the first one of its longest future. A finished turn is a line of the journal: after kill -9 a
build goes on behind it, and tries again what failed.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from upshot.api.scorer import first_of
from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, Row, Turn, derive_seed
from upshot.core.errors import UserError
from upshot.core.time_limit import limit_call
from upshot.offline.data.gather import POLICY
from upshot.offline.data.journal import Journal
from upshot.offline.data.outage import Outage
from upshot.offline.data.proactive import JsonProactive
from upshot.rollout.context import RolloutContext
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import describe_failure, score_reply
from upshot.rollout.policy import Policy
from upshot.rollout.rollout import Future, Rollout
from upshot.rollout.services import Services
from upshot.tasks.collabllm import PLAIN, PROACTIVE
from upshot.tasks.participants.base import Observation, Participant
from upshot.tasks.users.llm import END_SIGNAL

FIRST = "first answer"


@dataclass(frozen=True)
class BuildSettings:
    """How conversations are simulated."""

    candidates: int = 4
    """Replies tried at every turn."""
    proactive_share: float = 0.5
    """Share of them that the policy gives with the proactive prompt."""
    proactive: str = "system"
    """Form of that prompt: a `system` message, or CollabLLM's request for `json`."""
    system_share: float = 1.0
    """Share of the other candidates that have the plain system prompt; the rest have none."""
    samples: int = 3
    """Futures of a candidate."""
    rounds: int = 2
    """Rounds a future lasts; 0 scores the reply itself."""
    max_messages: int = 14
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=1024))
    concurrency: int = 32
    """Conversations under way at once."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise UserError(f"candidates is {self.candidates}; at least one reply must be tried")
        for name, share in (("proactive-share", self.proactive_share), ("system-share", self.system_share)):
            if not 0 <= share <= 1:
                raise UserError(f"{name} is {share}; it is a share, from 0 to 1")
        if self.max_messages < 2:
            raise UserError(f"max-messages is {self.max_messages}; a question and a reply are two")


@dataclass
class ConversationProgress:
    """A conversation under way: what is said, the user's session, and why it is over."""

    row: Row
    turns: tuple[Turn, ...] = ()
    session: dict[str, Any] = field(default_factory=dict)
    ended: str | None = None

    def add(self, line: dict[str, Any]) -> None:
        """Go on as a line of the journal says."""
        if line.get("failed"):  # not finished: another run tries it again
            return
        if line.get("best") is not None:
            self.turns = (*self.turns, Turn(Message("assistant", line["candidates"][line["best"]]["completion"])))
        said = line.get("next")
        if said is not None:
            self.turns = (*self.turns, Turn(Message("user", said["content"]), note=said.get("note") or {}))
        self.session = line.get("session") or {}
        self.ended = line["ended"]


class FirstAnswer(Participant):
    """The simulated user, with what it answers first in a future kept for the conversation to go on with."""

    def __init__(self, user: Participant) -> None:
        self.user = user

    async def observe(self, conversation: Conversation) -> Observation:
        """The user's own answer."""
        observation = await limit_call(self.user, self.user.observe, conversation)
        if FIRST not in conversation.session:
            session = copy.deepcopy({k: v for k, v in conversation.session.items() if k != "metrics"})
            conversation.session[FIRST] = (observation, session)
        return observation


class Builder:
    """Builds all conversations, concurrently and bounded."""

    def __init__(self, services: Services, settings: BuildSettings, journal: Journal) -> None:
        self.services = services
        self.settings = settings
        self.journal = journal
        (model,) = (model for name, model in services.models.items() if name.startswith(POLICY))
        self.plain = Policy(model, sampling=settings.sampling, system=PLAIN)
        self.bare = Policy(model, sampling=settings.sampling)
        self.proactive = Policy(model, sampling=settings.sampling, system=PROACTIVE)
        if settings.proactive == "json":
            self.proactive = JsonProactive(model, sampling=settings.sampling)
        user = FirstAnswer(services.user) if services.user is not None else None
        self.signal = str(getattr(services.user, "end_signal", END_SIGNAL))
        futures = Talk(services.metrics, services.weights, user, settings.samples, settings.rounds)
        self.context = RolloutContext(self.plain, futures)

    async def run(self, rows: Sequence[Row], told: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Bring every row's conversation to its end; `told` hears of each turn."""
        progress = {row.id: ConversationProgress(row, tuple(Turn(m) for m in row.messages)) for row in rows}
        for line in self.journal.lines:
            if line["conv"] in progress:
                progress[line["conv"]].add(line)
        gate = asyncio.Semaphore(self.settings.concurrency)
        outage = Outage("turns")

        async def one(conversation: ConversationProgress) -> None:
            async with gate:
                while conversation.ended is None:
                    line = await self._next(conversation)
                    line["spent"] = self.services.budget.state()
                    self.journal.append(line)
                    if told is not None:
                        told(line)
                    outage.heard(line.get("failed"))
                    if line.get("failed"):
                        return
                    conversation.add(line)

        try:
            async with asyncio.TaskGroup() as tasks:
                for conversation in progress.values():
                    tasks.create_task(one(conversation))
        except ExceptionGroup as group:
            raise first_of(group) from group

    async def _next(self, progress: ConversationProgress) -> dict[str, Any]:
        """The next line of a conversation: its opening, or a turn."""
        if not any(turn.message.role == "user" for turn in progress.turns):
            return await self._open(progress)
        return await self._turn(progress)

    async def _open(self, progress: ConversationProgress) -> dict[str, Any]:
        row = progress.row
        line: dict[str, Any] = {"conv": row.id, "turn": 0, "ended": None}
        if self.services.user is None:
            raise UserError(f"row '{row.id}' has no opening message and there is no --user to say one")
        conversation = self._conversation(progress)
        try:
            await limit_call(self.services.user, self.services.user.start, conversation)
        except UserError:
            raise
        except Exception as error:  # this conversation is over; the others go on
            return {**line, **_failure(f"opening: {describe_failure(error)}")}
        said = conversation.last("user")
        if said is None:
            return {**line, **_failure("opening: the user said nothing")}
        line["next"] = {"content": said.content, "note": dict(conversation.turns[-1].note)}
        line["session"] = {k: v for k, v in conversation.session.items() if k != "metrics"}
        return line

    async def _turn(self, progress: ConversationProgress) -> dict[str, Any]:
        """Try all candidates, keep the best, hear what the user says to it."""
        replies = await self._candidates(progress)
        candidates = [_tried(reply, kind, spoken, self.signal) for reply, kind, spoken in replies]
        scored = [i for i, c in enumerate(candidates) if c["score"] is not None]
        length = sum(turn.message.role != "system" for turn in progress.turns)
        line: dict[str, Any] = {"conv": progress.row.id, "turn": length, "candidates": candidates, "ended": None}
        if not scored:
            reasons = Counter(candidate["missing"] for candidate in candidates)
            return {**line, "best": None, **_failure(f"no candidate has a score ({reasons.most_common(1)[0][0]})")}
        line["best"] = max(scored, key=lambda i: candidates[i]["score"])
        if length + 3 > self.settings.max_messages:
            return {**line, "ended": "messages"}
        return {**line, **await self._answer(replies[line["best"]][0])}

    async def _candidates(self, progress: ConversationProgress) -> list[tuple[Rollout, str, str | None]]:
        """(reply, prompt it was given with, why it was not given) for every candidate."""
        conversation = self._conversation(progress)
        try:
            async with asyncio.TaskGroup() as tasks:
                tried = [
                    tasks.create_task(self._candidate(conversation, index, kind))
                    for index, kind in enumerate(kinds_of(self.settings))
                ]
        except ExceptionGroup as group:
            raise first_of(group) from group
        return [task.result() for task in tried]

    async def _candidate(self, conversation: Conversation, index: int, kind: str) -> tuple[Rollout, str, str | None]:
        policy = {"proactive": self.proactive, "plain": self.plain, "bare": self.bare}[kind]
        reply = Rollout(conversation.fork("candidate", index))
        try:
            await policy.reply(reply.conversation)
        except UserError:
            raise
        except Exception as error:  # this candidate is missing, with the reason; its siblings are not
            return reply, kind, f"reply: {describe_failure(error)}"
        if not reply.conversation.turns[-1].message.content.strip():
            return reply, kind, "reply: empty"
        await score_reply(self.context, reply)
        return reply, kind, None

    async def _answer(self, best: Rollout) -> dict[str, Any]:
        """What the user says to the best reply: the first turn of its longest future, or, without one, asked now."""
        played = [f for f in best.futures if f.missing is None and FIRST in f.conversation.session]
        if played:
            longest = max(played, key=lambda future: len(future.conversation.turns))
            observation, session = longest.conversation.session[FIRST]
        elif self.services.user is None:
            return {"ended": "no user"}
        else:
            fork = best.conversation.fork("user")
            try:
                observation = await limit_call(self.services.user, self.services.user.observe, fork)
            except UserError:
                raise
            except Exception as error:  # the conversation ends here, with the reason
                return _failure(f"user: {describe_failure(error)}")
            session = {k: v for k, v in fork.session.items() if k != "metrics"}
        said = "\n\n".join(message.content for message in observation.messages)
        if observation.done or not said:
            return {"ended": observation.reason if observation.done else "user: said nothing"}
        return {"next": {"content": said, "note": dict(observation.note)}, "session": session}

    def _conversation(self, progress: ConversationProgress) -> Conversation:
        """The conversation so far as the opening of the replies to come: its own turns cost them nothing."""
        messages = tuple(turn.message for turn in progress.turns)
        row = replace(progress.row, messages=messages)
        seed = derive_seed(self.settings.seed, row.id, len(progress.turns))
        conversation = Conversation(row, seed, turns=progress.turns)
        conversation.session = copy.deepcopy(progress.session)
        return conversation


def kinds_of(settings: BuildSettings) -> list[str]:
    """With which prompt each candidate of a turn is given."""
    proactive = round(settings.candidates * settings.proactive_share)
    plain = round((settings.candidates - proactive) * settings.system_share)
    return ["proactive"] * proactive + ["plain"] * plain + ["bare"] * (settings.candidates - proactive - plain)


def _failure(reason: str) -> dict[str, Any]:
    """The end of a conversation for now: another run tries its turn again."""
    return {"ended": reason, "failed": reason}


def _session(future: Future, start: int, signal: str) -> list[dict[str, str]]:
    """What was said after the reply; the user's leaving is written as the signal, as the published sets have it."""
    said = [{"role": t.message.role, "content": t.message.content} for t in future.conversation.turns[start:]]
    if future.conversation.ended != "user":
        return said
    if not said or said[-1]["role"] != "user":
        return [*said, {"role": "user", "content": signal}]
    return [*said[:-1], {"role": "user", "content": f"{said[-1]['content']} {signal}"}]


def _tried(reply: Rollout, kind: str, failed: str | None, signal: str) -> dict[str, Any]:
    """A candidate for the journal."""
    total = reply.reward.total
    if failed is not None:
        return {"completion": None, "prompt": kind, "score": None, "missing": failed, "sessions": [], "rewards": {}}
    start = len(reply.conversation.turns)
    return {
        "completion": reply.conversation.turns[-1].message.content,
        "prompt": kind,
        "score": total.value,
        "missing": total.reason if total.value is None else None,
        "sessions": [_session(future, start, signal) for future in reply.futures],
        "rewards": {
            name: [future.scores[name].value for future in reply.futures if name in future.scores]
            for name in reply.reward.terms
        },
    }
