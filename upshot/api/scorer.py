"""Replies that somebody gave, scored by what comes of them: who continues them, and what that is worth.

A thin layer over `upshot.rollout`: what is played and scored here is what training plays and scores.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, get_type_hints

from pydantic import Field

from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import Named
from upshot.config.registry import check_value
from upshot.config.renamed import RENAMED_ARGUMENTS
from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, Row, derive_seed
from upshot.core.errors import UserError, did_you_mean, user_error_in
from upshot.models.base import Completion, Model, Request
from upshot.models.client.budget import Budget
from upshot.rewards.build import ARROW, Metrics, metric_configs, named_metrics
from upshot.rollout.context import ReplyRule, RolloutContext
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import score_reply
from upshot.rollout.policy import Policy
from upshot.rollout.rollout import Rollout
from upshot.rollout.services import assemble
from upshot.tasks.base import Task, tasks
from upshot.tasks.participants.base import Participant

METRICS: Mapping[str, float] = {"accuracy": 1.0, "interactivity": 1.0}
OVERLONG_RULES = ("missing", "penalty", "score")
ModelLike = str | Mapping[str, Any] | ModelSpec | Model
"""An address (`http://…/v1#name`), `provider/model`, a folder, `scripted:…`, a mapping with options, or a `Model`."""


@dataclass(frozen=True)
class Scorer:
    """Scores replies that were given, whoever gave them."""

    context: RolloutContext
    tokenizer: Any = None
    max_tokens: int = 0
    """A reply of more tokens counts as over-long; 0: none does."""

    async def rate(self, row: Row, replies: Sequence[str], seed: int = 0) -> list[Rollout]:
        """Play and score the futures of all replies to one row, at once."""
        conversations = []
        for index, text in enumerate(replies):
            conversation = Conversation(row, derive_seed(seed, row.id, index), key=f"{row.id}#{index}")
            conversation.say(Message("assistant", text))
            conversations.append(conversation)
        return await self.rate_all(conversations)

    async def rate_all(self, conversations: Sequence[Conversation]) -> list[Rollout]:
        """The same for conversations whose last turn is the reply."""
        for conversation in conversations:
            self._mark_overlong(conversation)
        rated = [Rollout(conversation) for conversation in conversations]
        try:
            async with asyncio.TaskGroup() as tasks:
                for reply in rated:
                    tasks.create_task(score_reply(self.context, reply))
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
class ScoreSettings:
    """Who continues the conversation, and what it is worth.

    A model is an address (`http://…/v1#name`), `provider/model`, a folder, `scripted:…`, a mapping with options, or a
    `Model`.
    """

    policy: ModelLike | None = None
    """The model that replied; it speaks in the futures. Needed when rounds > 0."""
    user: ModelLike | Participant | None = None
    """The model that plays the user, or a `Participant`. Needed when rounds > 0."""
    judge: ModelLike | None = None
    """The model behind judged metrics and extraction."""
    metrics: Metrics = field(default_factory=lambda: METRICS)
    """name or function → weight, or → {weight, clamp, and the metric's own options}. weight × mean is clamped to −1…1
    unless `clamp` says otherwise; clamp None takes the bounds away."""
    samples: Annotated[int, Field(ge=1)] = 3
    """Futures per reply."""
    rounds: Annotated[int, Field(ge=0)] = 2
    """Rounds (a user turn and a policy turn) that a future may last; 0 scores the reply itself."""
    max_tokens: Annotated[int, Field(ge=1)] = 1024
    """Of each policy turn in the futures."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Of the policy in the futures."""
    system: str = ""
    """A system prompt of the policy in the futures."""
    overlong: str | ReplyRule = "score"
    """'score', 'missing' or 'penalty': the rule for replies of more than `max_reply_tokens` tokens."""
    max_reply_tokens: Annotated[int, Field(ge=0)] = 0
    """0: no reply is over-long."""
    user_options: Mapping[str, Any] = field(default_factory=dict)
    """persona, vagueness, task_description … of the simulated user (`LLMUser`)."""
    tokenizer: Any = None
    """Of the policy, for token_amount and max_reply_tokens: a folder, a Hub name, or the object."""
    task: str | Task | None = None
    """A task or its name, for the metric `verifier`."""
    sandbox: Any = "local"
    """'local', the URL of a sandbox server, or a `CodeRunner`, for pass_rate."""
    budget: Budget | None = None
    """What the models may cost."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ScoreSettings:
        """Settings from keyword arguments; a wrong name is a `UserError`."""
        kinds = get_type_hints(cls, include_extras=True)
        for name in settings:
            if name in RENAMED_ARGUMENTS:
                raise UserError(f"the setting '{name}' of upshot.reward is '{RENAMED_ARGUMENTS[name]}' now")
            if name not in kinds:
                known = {*kinds, "goal", "reference", "meta", "seed"}
                raise UserError(f"unknown setting '{name}' of upshot.reward; {did_you_mean(name, known)}")
        chosen = cls(**{name: _setting(name, value, kinds[name]) for name, value in settings.items()})
        if chosen.rounds and (chosen.policy is None or chosen.user is None):
            raise UserError(
                f"rounds={chosen.rounds} continues the conversation: give policy= and user= "
                "(rounds=0 scores the reply itself)"
            )
        if chosen.task is None and _wants(chosen.metrics, "verifier"):
            raise UserError("the metric 'verifier' asks a task: give task=, the name of one")
        rule = chosen.overlong if isinstance(chosen.overlong, str) else chosen.overlong.rule
        if rule not in OVERLONG_RULES:
            raise UserError(f"unknown rule '{rule}' for over-long replies; {did_you_mean(rule, OVERLONG_RULES)}")
        return chosen


def _setting(name: str, value: Any, kind: Any) -> Any:
    """A setting as it is used; a wrong type is a `UserError` that says what would be right."""
    if name in ("policy", "user", "judge"):
        wanted: tuple[Any, ...] = (str, Mapping, ModelSpec, Model, *((Participant,) if name == "user" else ()))
        if value is not None and not isinstance(value, wanted):
            raise UserError(
                f"{name} is {value!r:.80} ({type(value).__name__}): a model is an address ('http://…/v1#name'), "
                "'provider/model', a folder, a mapping with options, or a Model"
            )
        return value
    return named_metrics(value) if name == "metrics" else check_value(name, value, kind)


@asynccontextmanager
async def open_rater(**settings: Any) -> AsyncIterator[Scorer]:
    """Connect the models, build the metrics, and close again what was opened here; see `ScoreSettings`."""
    chosen = ScoreSettings.of(settings)
    roles = {"policy": chosen.policy, "user": chosen.user, "judge": chosen.judge}
    models = {role: given for role, given in roles.items() if given is not None and not isinstance(given, Participant)}
    user: Named | Participant | None = None
    if isinstance(chosen.user, Participant):
        user = chosen.user
    elif chosen.user is not None:
        user = Named.model_validate({"name": "llm", **chosen.user_options})
    counter = TokenCounter(chosen.tokenizer)
    services = assemble(
        tasks.create(chosen.task) if isinstance(chosen.task, str) else chosen.task,
        models,
        metric_configs(named_metrics(chosen.metrics)),
        user=user,
        sandbox=chosen.sandbox,
        budget=chosen.budget,
        tokenizer=counter,
    )
    counter.policy = services.models.get("policy")
    async with services:
        if not counter.found and (chosen.max_reply_tokens or _wants(chosen.metrics, "token_amount")):
            raise UserError("token_amount and max_reply_tokens count the policy's tokens: give tokenizer=")
        policy = Policy(
            services.models.get("policy") or _Nobody(),
            sampling=Sampling(chosen.max_tokens, chosen.temperature),
            system=chosen.system,
        )
        futures = Talk(services.metrics, services.weights, services.user, chosen.samples, chosen.rounds)
        overlong = ReplyRule(chosen.overlong) if isinstance(chosen.overlong, str) else chosen.overlong
        yield Scorer(RolloutContext(policy, futures, overlong=overlong), counter, chosen.max_reply_tokens)


def first_of(group: BaseExceptionGroup[Any]) -> BaseException:
    """The one line the user must read, out of a group of failures; the group itself when it holds none."""
    return user_error_in(group) or group


class _Nobody(Model):
    """Stands where no policy is needed: nothing is continued at rounds 0."""

    name = "nobody"

    async def generate(self, request: Request) -> list[Completion]:
        raise UserError("no policy was given to continue the conversation")


def _wants(metrics: Any, name: str) -> bool:
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
            from upshot.models.local import load_tokenizer

            return load_tokenizer(self.given)
        return self.given if self.given is not None or self.policy is None else self.policy.tokenizer

    def __bool__(self) -> bool:
        return self.found is not None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text."""
        ids: list[int] = self.found.encode(text, add_special_tokens=add_special_tokens)
        return ids
