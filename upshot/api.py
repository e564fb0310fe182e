"""The multiturn-aware reward as a library call: `upshot.reward(...)`.

    replies = upshot.reward(
        [{"role": "user", "content": "I need to solve a quadratic."}],
        ["Which one?", "x = 3."],
        goal="Solve x^2 - 5x + 6 = 0.", reference="x = 2 or x = 3",
        policy="http://127.0.0.1:8000/v1#my-model", user="openai/gpt-4o-mini", judge="openai/gpt-4o-mini",
        metrics={"accuracy": 1, "interactivity": 1}, samples=3, window=2,
    )
    print(replies[0].reward.total.value, replies[0].reward.parts)

A thin layer over `upshot.rollout`: what is played and scored here is what training plays and scores.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, fields, replace
from threading import Thread
from typing import Any

from upshot.chat import Conversation, Message, Row, derive_seed, messages_from
from upshot.errors import UserError, did_you_mean, user_error_in
from upshot.models.base import Completion, Model, Request, Sampling
from upshot.models.budget import Budget
from upshot.models.connect import connect_all
from upshot.participants.base import Participant, users
from upshot.rewards.build import ARROW, build_metric
from upshot.rewards.metric import Metric
from upshot.rewards.reward import Weighted
from upshot.rollout.play import ReplyRule, Scene, score_reply
from upshot.rollout.policy import Policy
from upshot.rollout.reply import Reply
from upshot.tasks.base import tasks

METRICS: Mapping[str, float] = {"accuracy": 1.0, "interactivity": 1.0}
CLAMP = (-1.0, 1.0)
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

    scene: Scene
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
                    tasks.create_task(score_reply(self.scene, reply))
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
    async with AsyncExitStack() as stack:
        given = {"policy": chosen.policy, "user": chosen.user, "judge": chosen.judge}
        models = await _connect(stack, given, chosen.budget)
        counter = _tokenizer(chosen.tokenizer, models.get("policy"))
        if counter is None and (chosen.max_reply_tokens or _wants(chosen.metrics, "token_amount")):
            raise UserError("token_amount and max_reply_tokens count the policy's tokens: give tokenizer=")
        context = {
            "judge": models.get("judge"),
            "models": models,
            "tokenizer": counter,
            "task": tasks.create(chosen.task) if isinstance(chosen.task, str) else chosen.task,
            "sandbox": await _sandbox(stack, chosen.sandbox) if _wants(chosen.metrics, "pass_rate") else None,
        }
        built, weights = build_metrics(chosen.metrics, context)
        for metric in built.values():
            stack.push_async_callback(metric.aclose)
        scene = Scene(
            Policy(
                models.get("policy") or _Nobody(),
                sampling=Sampling(chosen.max_tokens, chosen.temperature),
                system=chosen.system,
            ),
            built,
            weights,
            user=chosen.user if isinstance(chosen.user, Participant) else _user(models, chosen.user_options),
            samples=chosen.samples,
            window=chosen.window,
            overlong=ReplyRule(chosen.overlong) if isinstance(chosen.overlong, str) else chosen.overlong,
        )
        yield Rater(scene, counter, chosen.max_reply_tokens)


def build_metrics(
    metrics: Mapping[str, Any], context: Mapping[str, Any]
) -> tuple[dict[str, Metric], dict[str, Weighted]]:
    """Metrics and how they enter the reward, from name → weight or name → settings."""
    built: dict[str, Metric] = {}
    weights: dict[str, Weighted] = {}
    for name, setting in metrics.items():
        options = dict(setting) if isinstance(setting, Mapping) else {"weight": setting}
        weight, clamp = float(options.pop("weight", 1.0)), options.pop("clamp", CLAMP)
        built[name] = build_metric(name, options, "metrics", **context)
        weights[name] = Weighted(weight, tuple(clamp) if clamp is not None else None, built[name].intrinsic)
    return built, weights


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


async def _connect(stack: AsyncExitStack, given: Mapping[str, Any], budget: Budget | None) -> dict[str, Model]:
    """Models by role; those named by a spec are opened (and closed) here, `Model` objects stay their owner's."""
    specs = {r: v for r, v in given.items() if v is not None and not isinstance(v, Model | Participant)}
    made = connect_all(specs, budget=budget)
    for model in {id(model): model for model in made.values()}.values():
        await stack.enter_async_context(model)
    return {role: made.get(role, value) for role, value in given.items() if isinstance(made.get(role, value), Model)}


def _user(models: Mapping[str, Model], options: Mapping[str, Any]) -> Participant | None:
    return users.create("llm", options, "user_options", model=models["user"]) if "user" in models else None


def _wants(metrics: Mapping[str, Any], name: str) -> bool:
    return any(key.split(ARROW)[-1].strip() == name for key in metrics)


def _tokenizer(given: Any, policy: Model | None) -> Any:
    """The tokenizer to count with: the one given, else that of a policy in this process."""
    if isinstance(given, str):
        from transformers import AutoTokenizer

        from upshot.models.local import local_path

        return AutoTokenizer.from_pretrained(local_path(given))
    return given if given is not None or policy is None else policy.tokenizer


async def _sandbox(stack: AsyncExitStack, sandbox: Any) -> Any:
    if not isinstance(sandbox, str):
        return sandbox
    from upshot.sandbox import connect

    runner = connect(sandbox)
    stack.push_async_callback(runner.aclose)
    return runner
