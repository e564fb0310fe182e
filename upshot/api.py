"""The multiturn-aware reward as a library call: `upshot.reward(...)`.

    replies = upshot.reward(
        [{"role": "user", "content": "I need to solve a quadratic."}],
        ["Which one?", "x = 3."],
        goal="Solve x^2 - 5x + 6 = 0.", reference="x = 2 or x = 3",
        policy="http://127.0.0.1:8000/v1#my-model", user="openai/gpt-4o-mini", judge="openai/gpt-4o-mini",
        metrics={"accuracy": 1, "interactivity": 1}, samples=3, window=2,
    )
    print(replies[0].reward.total.value, replies[0].reward.terms)

A thin layer over `upshot.rollout`: what is played and scored here is what training plays and scores.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any

from upshot.chat import Conversation, Message, Row, derive_seed, messages_from
from upshot.errors import UserError, did_you_mean, user_error_in
from upshot.models.base import Completion, Model, Request, Sampling
from upshot.models.budget import Budget
from upshot.participants.base import Participant
from upshot.recipe import Named
from upshot.rewards.build import ARROW
from upshot.rollout.company import assemble, metric_configs
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import score_reply
from upshot.rollout.policy import Policy
from upshot.rollout.reply import Reply
from upshot.rollout.stage import ReplyRule, Stage
from upshot.tasks.base import tasks

METRICS: Mapping[str, float] = {"accuracy": 1.0, "interactivity": 1.0}
OVERLONG_RULES = ("missing", "penalty", "score")
Messages = Sequence[Message] | Sequence[Mapping[str, Any]]


def reward(messages: Messages, replies: str | Sequence[str], **settings: Any) -> Any:
    """The multiturn-aware reward of one reply, or of several: see `reward_async` for the settings.

    Works in a notebook, too, where an event loop is already running.
    """
    return run_anywhere(reward_async(messages, replies, **settings))


async def reward_async(
    messages: Messages,
    replies: str | Sequence[str],
    *,
    goal: Any = None,
    reference: Any = None,
    meta: Mapping[str, Any] | None = None,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """A `Reply` (its `.reward` has total, parts and means, its `.futures` the conversations); a list for several.

    messages: the conversation before the reply. goal: what the user wants. reference: the right answer or document.
    meta: further fields of the row (`tests` for pass_rate, `task_desc` and `persona` for the user).
    settings: those of `Settings`.
    """
    row = Row("row", as_messages(messages), goal, reference, "api", meta or {})
    many = [replies] if isinstance(replies, str) else list(replies)
    async with open_rater(**settings) as rater:
        rated = await rater.rate(row, many, seed)
    return rated[0] if isinstance(replies, str) else rated


@dataclass(frozen=True)
class Rater:
    """Scores replies that were given, whoever gave them."""

    stage: Stage
    tokenizer: Any = None
    max_tokens: int = 0
    """A reply of more tokens counts as over-long; 0: none does."""

    async def rate(self, row: Row, replies: Sequence[str], seed: int = 0) -> list[Reply]:
        """Play and score the futures of all replies to one row, at once."""
        conversations = []
        for index, text in enumerate(replies):
            conversation = Conversation(row, derive_seed(seed, row.id, index), key=f"{row.id}#{index}")
            conversation.say(Message("assistant", text))
            conversations.append(conversation)
        return await self.rate_all(conversations)

    async def rate_all(self, conversations: Sequence[Conversation]) -> list[Reply]:
        """The same for conversations whose last turn is the reply."""
        for conversation in conversations:
            self._mark_overlong(conversation)
        rated = [Reply(conversation) for conversation in conversations]
        try:
            async with asyncio.TaskGroup() as tasks:
                for reply in rated:
                    tasks.create_task(score_reply(self.stage, reply))
        except ExceptionGroup as group:
            raise first_of(group) from group
        return rated

    def _mark_overlong(self, conversation: Conversation) -> None:
        """Note a reply beyond the limit as cut, which is how the rule for over-long replies knows it."""
        turn = conversation.turns[-1]
        if not self.max_tokens or turn.message.role != "assistant":
            return
        if len(self.tokenizer.encode(turn.message.content, add_special_tokens=False)) > self.max_tokens:
            conversation.turns = (*conversation.turns[:-1], replace(turn, note={**turn.note, "finish": "length"}))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Who continues the conversation, and what it is worth.

    A model is an address (`http://…/v1#name`), `provider/model`, a folder, `scripted:…`, a mapping with options, or a
    `Model`.
    """

    policy: Any = None
    """The model that replied; it speaks in the futures. Needed when window > 0."""
    user: Any = None
    """The model that plays the user, or a `Participant`. Needed when window > 0."""
    judge: Any = None
    """The model behind judged metrics and extraction."""
    metrics: Mapping[str, Any] = field(default_factory=lambda: METRICS)
    """name → weight, or name → {weight, clamp, and the metric's own options}. weight × mean is clamped to −1…1 unless
    `clamp` says otherwise; clamp None takes the bounds away."""
    samples: int = 3
    """Futures per reply."""
    window: int = 2
    """Rounds (a user turn and a policy turn) that a future may last; 0 scores the reply itself."""
    max_tokens: int = 1024
    """Of each policy turn in the futures."""
    temperature: float = 1.0
    """Of the policy in the futures."""
    system: str = ""
    """A system prompt of the policy in the futures."""
    overlong: str | ReplyRule = "score"
    """'score', 'missing' or 'penalty': the rule for replies of more than `max_reply_tokens` tokens."""
    max_reply_tokens: int = 0
    """0: no reply is over-long."""
    user_options: Mapping[str, Any] = field(default_factory=dict)
    """persona, vagueness, task_description … of the simulated user (`LLMUser`)."""
    tokenizer: Any = None
    """Of the policy, for token_amount and max_reply_tokens: a folder, a Hub name, or the object."""
    task: Any = None
    """A task or its name, for the metric `verifier`."""
    sandbox: Any = "local"
    """'local', the URL of a sandbox server, or a `CodeRunner`, for pass_rate."""
    budget: Budget | None = None
    """What the models may cost."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Settings:
        """Settings from keyword arguments; a wrong name is a `UserError`."""
        known = {f.name for f in fields(cls)}
        for name in settings:
            if name not in known:
                raise UserError(f"unknown setting '{name}' of upshot.reward; {did_you_mean(name, known)}")
        chosen = cls(**settings)
        if chosen.window and (chosen.policy is None or chosen.user is None):
            raise UserError(
                f"window {chosen.window} continues the conversation: give policy= and user= "
                "(window=0 scores the reply itself)"
            )
        if chosen.task is None and _wants(chosen.metrics, "verifier"):
            raise UserError("the metric 'verifier' asks a task: give task=, the name of one")
        rule = chosen.overlong if isinstance(chosen.overlong, str) else chosen.overlong.rule
        if rule not in OVERLONG_RULES:
            raise UserError(f"unknown rule '{rule}' for over-long replies; {did_you_mean(rule, OVERLONG_RULES)}")
        return chosen


@asynccontextmanager
async def open_rater(**settings: Any) -> AsyncIterator[Rater]:
    """Connect the models, build the metrics, and close again what was opened here; see `Settings`."""
    chosen = Settings.of(settings)
    roles = {"policy": chosen.policy, "user": chosen.user, "judge": chosen.judge}
    models = {role: given for role, given in roles.items() if given is not None and not isinstance(given, Participant)}
    wants_user = chosen.user is not None and not isinstance(chosen.user, Participant)
    counter = TokenCounter(chosen.tokenizer)
    company = assemble(
        tasks.create(chosen.task) if isinstance(chosen.task, str) else chosen.task,
        models,
        metric_configs(chosen.metrics),
        user=Named.model_validate({"name": "llm", **chosen.user_options}) if wants_user else chosen.user,
        sandbox=chosen.sandbox,
        budget=chosen.budget,
        tokenizer=counter,
    )
    counter.policy = company.models.get("policy")
    async with company:
        if not counter.found and (chosen.max_reply_tokens or _wants(chosen.metrics, "token_amount")):
            raise UserError("token_amount and max_reply_tokens count the policy's tokens: give tokenizer=")
        policy = Policy(
            company.models.get("policy") or _Nobody(),
            sampling=Sampling(chosen.max_tokens, chosen.temperature),
            system=chosen.system,
        )
        futures = Talk(company.metrics, company.weights, company.user, chosen.samples, chosen.window)
        overlong = ReplyRule(chosen.overlong) if isinstance(chosen.overlong, str) else chosen.overlong
        yield Rater(Stage(policy, futures, overlong=overlong), counter, chosen.max_reply_tokens)


def as_messages(messages: Messages) -> tuple[Message, ...]:
    """Messages from messages or their dictionaries."""
    return tuple(m if isinstance(m, Message) else messages_from([m])[0] for m in messages)


def run_anywhere(work: Any) -> Any:
    """Run a coroutine to its end, in a thread of its own where this one already runs an event loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    outcome: dict[str, Any] = {}
    context = copy_context()  # the caller's time limit holds in the thread, too

    def target() -> None:
        try:
            outcome["value"] = context.run(asyncio.run, work)
        except BaseException as error:
            outcome["error"] = error

    thread = Thread(target=target, name="upshot-reward")
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def first_of(group: BaseExceptionGroup[Any]) -> BaseException:
    """The one line the user must read, out of a group of failures; the group itself when it holds none."""
    return user_error_in(group) or group


class _Nobody(Model):
    """Stands where no policy is needed: nothing is continued at window 0."""

    name = "nobody"

    async def generate(self, request: Request) -> list[Completion]:
        raise UserError("no policy was given to continue the conversation")


def _wants(metrics: Mapping[str, Any], name: str) -> bool:
    return any(key.split(ARROW)[-1].strip() == name for key in metrics)


class TokenCounter:
    """Counts tokens with the tokenizer that was given, else with that of a started policy in this process."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.policy: Model | None = None

    @cached_property
    def found(self) -> Any:
        """The tokenizer; None where there is none."""
        if isinstance(self.given, str):
            from transformers import AutoTokenizer

            from upshot.models.local import local_path

            own = Path(self.given).expanduser()  # a folder may hold a tokenizer and no model
            alone = (own / "tokenizer_config.json").is_file()
            return AutoTokenizer.from_pretrained(str(own) if alone else local_path(self.given))
        return self.given if self.given is not None or self.policy is None else self.policy.tokenizer

    def __bool__(self) -> bool:
        return self.found is not None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text."""
        ids: list[int] = self.found.encode(text, add_special_tokens=add_special_tokens)
        return ids
