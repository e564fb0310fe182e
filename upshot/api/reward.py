"""The multiturn-aware reward as a library call: `upshot.reward(...)`.

    replies = upshot.reward(
        [{"role": "user", "content": "I need to solve a quadratic."}],
        ["Which one?", "x = 3."],
        goal="Solve x^2 - 5x + 6 = 0.", reference="x = 2 or x = 3",
        policy="http://127.0.0.1:8000/v1#my-model", user="openai/gpt-4o-mini", judge="openai/gpt-4o-mini",
        metrics={"accuracy": 1, "interactivity": 1}, samples=3, rounds=2,
    )
    print(replies[0].reward.total.value, replies[0].reward.terms)

The settings are listed in `upshot/api/settings.py`. This is a thin layer over `upshot.rollout`: it plays and scores
exactly what training plays and scores.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Unpack, get_args, get_type_hints, overload

from pydantic import Field

from upshot.api.settings import FACTS, OVERLONG_RULES, RewardOptions, Setting
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import Named
from upshot.config.sampling import Sampling
from upshot.config.validation import check_value
from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import UserError, did_you_mean, user_error_in
from upshot.core.event_loop import gather, run_anywhere
from upshot.models.base import Model
from upshot.models.client.budget import Budget
from upshot.models.scripted import AbsentPolicy
from upshot.rewards.build import ARROW, metric_configs, named_metrics
from upshot.rollout.episode import Policy
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import ReplyRule, RolloutContext, score_reply
from upshot.rollout.reply import Rollout
from upshot.rollout.services import assemble
from upshot.tasks.base import Task, tasks
from upshot.tasks.datasets.records import RecordedReplies
from upshot.tasks.participants.base import Participant

Messages = Sequence[Message] | Sequence[Mapping[str, Any]]
Replies = list[str] | tuple[str, ...]
MODEL = (str, Mapping, ModelSpec, Model)
CLASSES: Mapping[str, Any] = {"overlong": str | ReplyRule, "task": str | Task | None, "budget": Budget | None}
"""Kinds of settings that `settings.py` cannot import."""


@overload
def reward(messages: Messages, replies: str, **options: Unpack[RewardOptions]) -> Rollout: ...
@overload
def reward(messages: Messages, replies: Replies, **options: Unpack[RewardOptions]) -> list[Rollout]: ...
def reward(messages: Messages, replies: str | Replies, **options: Unpack[RewardOptions]) -> Rollout | list[Rollout]:
    """Score replies by what they lead to; one reply gives a `Rollout`, a list of replies a list of them.

        (reply,) = upshot.reward(messages, ["Which one?"], rounds=0, metrics={polite: 1.0})
        print(reply.reward.total.value, reply.reward.terms, reply.futures)

    messages: the conversation before the reply, as messages or as mappings with role and content.
    replies: one reply or several.

    With `rounds` above 0 the models `policy` and `user` continue each reply `samples` times before it is scored; with
    `rounds=0` the reply itself is scored. All settings are listed in `RewardOptions`. Works in a notebook, where an
    event loop is already running.
    """
    with one_line():
        return run_anywhere(_reward(messages, replies, options))


@overload
async def reward_async(messages: Messages, replies: str, **options: Unpack[RewardOptions]) -> Rollout: ...
@overload
async def reward_async(messages: Messages, replies: Replies, **options: Unpack[RewardOptions]) -> list[Rollout]: ...
async def reward_async(
    messages: Messages, replies: str | Replies, **options: Unpack[RewardOptions]
) -> Rollout | list[Rollout]:
    """The same as `reward`, for async code."""
    with one_line():
        return await _reward(messages, replies, options)


async def _reward(messages: Messages, replies: str | Replies, options: RewardOptions) -> Rollout | list[Rollout]:
    texts = [replies] if isinstance(replies, str) else list(check_value("replies", replies, list[str]))
    chosen = check_options(options)
    row = Row("row", read_messages(messages), chosen["goal"], chosen["reference"], "api", chosen["meta"] or {})
    async with open_scorer(**{name: value for name, value in options.items() if name not in FACTS}) as scorer:
        replied = RecordedReplies(row, tuple(texts)).conversations(chosen["seed"]) if texts else []
        scored = await scorer.score_all(replied)
    return scored[0] if isinstance(replies, str) else scored


@contextmanager
def one_line() -> Iterator[None]:
    """If the user can fix the error, raise it alone, without the exceptions and groups around it."""
    try:
        yield
    except (Exception, BaseExceptionGroup) as error:
        known = user_error_in(error)
        if known is None:
            raise
        known.__cause__ = known.__context__ = None
        raise known.with_traceback(None) from None


def read_messages(messages: Messages) -> tuple[Message, ...]:
    """Messages from messages or their dictionaries."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise UserError(f"messages is {messages!r:.80}: give a list, such as [{{'role': 'user', 'content': '…'}}]")
    for place, message in enumerate(messages):
        whole = (
            isinstance(message, Mapping) and "role" in message and isinstance(message.get("content", ""), str | None)
        )
        if not isinstance(message, Message) and not whole:
            raise UserError(f"messages[{place}] is {message!r:.80}: a message is {{'role': …, 'content': 'text'}}")
    return tuple(m if isinstance(m, Message) else Message.from_dict(m) for m in messages)


def check_options(options: Mapping[str, Any]) -> RewardOptions:
    """The given options and the defaults of all others; a wrong name or value is a `UserError`."""
    kinds = get_type_hints(RewardOptions, include_extras=True)
    for name in options:
        if name not in kinds:
            raise UserError(f"unknown setting '{name}' of upshot.reward; {did_you_mean(name, kinds)}")
    chosen: Any = {}
    for name, hint in kinds.items():
        kind, setting = get_args(hint)
        chosen[name] = _check(name, options[name], kind, setting) if name in options else setting.default
    chosen["metrics"] = named_metrics(chosen["metrics"])
    rule = chosen["overlong"] if isinstance(chosen["overlong"], str) else chosen["overlong"].rule
    if rule not in OVERLONG_RULES:
        raise UserError(f"unknown rule '{rule}' for over-long replies; {did_you_mean(rule, OVERLONG_RULES)}")
    return chosen  # type: ignore[no-any-return]


def _check(name: str, value: Any, kind: Any, setting: Setting) -> Any:
    if name in ("policy", "user", "judge"):
        if value is not None and not isinstance(value, (*MODEL, *((Participant,) if name == "user" else ()))):
            raise UserError(
                f"{name} is {value!r:.80} ({type(value).__name__}): a model is an address ('http://…/v1#name'), "
                "'provider/model', a folder, a mapping with options, or a Model"
            )
        return value
    if setting.least is not None:
        kind = Annotated[kind, Field(ge=setting.least, allow_inf_nan=None if kind is int else False)]
    return check_value(name, value, CLASSES.get(name, kind))


@dataclass(frozen=True)
class Scorer:
    """Scores given replies, whoever wrote them, by what they lead to."""

    context: RolloutContext
    tokenizer: Any = None
    max_tokens: int = 0
    """A reply with more tokens counts as over-long; 0: no limit."""

    async def score_all(self, conversations: Sequence[Conversation]) -> list[Rollout]:
        """Play and score the futures of conversations whose last turn is the reply, all at once."""
        for conversation in conversations if self.max_tokens else ():
            turn = conversation.turns[-1]
            text = f"{turn.note.get('thought', '')}{turn.message.content}"
            length = len(self.tokenizer.encode(text, add_special_tokens=False))
            if turn.message.role == "assistant" and length > self.max_tokens:  # `ReplyRule` looks for this mark
                conversation.turns = (*conversation.turns[:-1], replace(turn, note={**turn.note, "finish": "length"}))
        replies = [Rollout(conversation) for conversation in conversations]
        await gather(score_reply(self.context, reply) for reply in replies)
        return replies


@asynccontextmanager
async def open_scorer(**options: Any) -> AsyncIterator[Scorer]:
    """Connect the models, build the metrics, and close at the end what this opened; options: see `RewardOptions`."""
    chosen = check_options(options)
    rounds, metrics, task, speaker = chosen["rounds"], chosen["metrics"], chosen["task"], chosen["user"]
    if rounds and (chosen["policy"] is None or speaker is None):
        raise UserError(
            f"rounds={rounds} needs policy= and user= to continue the conversation; rounds=0 scores the reply itself"
        )
    if task is None and _wants(metrics, "verifier"):
        raise UserError("the metric 'verifier' needs a task: give task=NAME")
    roles = {"policy": chosen["policy"], "user": speaker, "judge": chosen["judge"]}
    user = speaker if isinstance(speaker, Participant) else None
    counter = TokenCounter(chosen["tokenizer"])
    services = assemble(
        tasks.create(task) if isinstance(task, str) else task,
        {role: model for role, model in roles.items() if model is not None and not isinstance(model, Participant)},
        metric_configs(named_metrics(metrics)),
        user=user or (Named.model_validate({"name": "llm", **chosen["user_options"]}) if speaker is not None else None),
        sandbox=chosen["sandbox"],
        budget=chosen["budget"],
        tokenizer=counter,
    )
    counter.policy = services.models.get("policy")
    async with services:
        if not counter and (chosen["max_reply_tokens"] or _wants(metrics, "token_amount")):
            raise UserError(
                "token_amount and max_reply_tokens count the policy's tokens, which needs tokenizer= (--tokenizer)"
            )
        sampling = Sampling(chosen["max_tokens"], chosen["temperature"])
        policy = Policy(services.models.get("policy") or AbsentPolicy(), sampling=sampling, system=chosen["system"])
        futures = Talk(services.metrics, services.weights, services.user, chosen["samples"], rounds)
        rule = chosen["overlong"]
        overlong = ReplyRule(rule) if isinstance(rule, str) else rule
        yield Scorer(RolloutContext(policy, futures, overlong=overlong), counter, chosen["max_reply_tokens"])


def _wants(metrics: Any, name: str) -> bool:
    return any(key.split(ARROW)[-1].strip() == name for key in metrics)


class TokenCounter:
    """Counts tokens with the given tokenizer, or else with the one of a started policy in this process."""

    def __init__(self, chosen: Any) -> None:
        self.chosen = chosen
        self.policy: Model | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer; None where there is none."""
        if isinstance(self.chosen, str):
            from upshot.models.local import load_tokenizer

            return load_tokenizer(self.chosen)
        return self.chosen if self.chosen is not None or self.policy is None else self.policy.tokenizer

    def __bool__(self) -> bool:
        return self.tokenizer is not None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
