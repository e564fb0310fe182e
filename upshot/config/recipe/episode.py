"""How a conversation proceeds, how it is continued, and which of its tokens get the credit."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator

from upshot.config.bounds import Words
from upshot.config.recipe.base import Named, Section

SAMPLES, ROUNDS = 1, 0
"""Defaults of `futures.samples` and `futures.rounds`."""


class AgentConfig(Section):
    """An external program that plays the episodes; a plain string is short for `program`."""

    short_key: ClassVar[str] = "program"

    program: Words
    """A command that is started for every row, or 'my_pkg.module:function', called for every row. Either one calls the
    policy at an OpenAI-compatible address that is specific to its conversation."""
    outcome: Literal["task", "exit"] = "task"
    """The reward of an episode whose program posts none. task: the task's verdict on the last reply. exit: 1 if the
    command exits with status 0, else 0."""
    seconds: float = Field(600.0, gt=0)
    """Time limit of one episode in seconds; an episode that takes longer is stopped, and its score is missing."""
    calls: int = Field(128, ge=1)
    """Maximum number of calls to the policy in one episode; further calls are refused."""
    at_once: int = Field(64, ge=1)
    """Maximum number of agents running at once."""


class EpisodeConfig(Section):
    """How the trained part of a conversation proceeds."""

    agent: AgentConfig | None = None
    """A program that plays the episodes and calls the policy as often as it likes. None: policy and environment take
    turns."""
    max_turns: int = Field(1, ge=1)
    """Maximum number of policy turns; the task's environment answers between them."""
    with_user: bool = False
    """Whether the simulated user (`futures.user`, else the task's own) answers between the turns instead of the
    environment; calls to the task's tools are still answered by the tools."""
    max_tokens: int = Field(512, ge=1)
    """Maximum number of tokens in one policy turn, also in futures."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature of the policy, also in futures."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: sample only from the most likely tokens that together have this probability; 1: from all.
    Training uses the log-probabilities before the cut."""
    top_k: int = Field(0, ge=0)
    """Sample only from the k most likely tokens; 0: from all. Training uses the log-probabilities before the cut."""
    system: str = ""
    """A system prompt for the policy, placed before the row's messages."""
    long_prompts: Literal["error", "filter", "truncate"] = "error"
    """What to do with rows whose prompt leaves no room for a reply in the model's context. error: refuse to start.
    filter: leave the row out. truncate: drop the beginning of its longest message."""
    think: tuple[Words, Words] | None = ("<think>", "</think>")
    """Markers around the policy's thoughts, which no other participant sees; None: everything it writes is visible."""


class FuturesConfig(Named):
    """How a reply is continued before it is scored; further keys are options of the kind of future."""

    name: str = "talk"
    """talk: a simulated user and the policy continue the conversation. classmates: other models continue from the
    thought. none: no continuation. Or 'my_pkg.module:Kind'."""
    samples: Annotated[int, Field(ge=1)] | Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] = SAMPLES
    """Futures per reply; classmates: per classmate. talk: in a list such as [3, 2], the first number forks the reply,
    and each further number forks every future again at its next round."""
    rounds: int = Field(ROUNDS, ge=0)
    """talk: maximum length of a future in rounds (one user turn and one policy turn each); 0: score the reply
    itself."""
    user: Named | None = None
    """talk: the simulated user; None: the task's own."""

    @field_validator("samples", mode="before")
    @classmethod
    def _number_or_numbers(cls, value: Any) -> Any:
        """Say what is allowed in one sentence; pydantic would report the errors of both types."""
        numbers = value if isinstance(value, list) else [value]
        if not numbers or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in numbers):
            raise ValueError("give a whole number of 1 or more, or a list of them, such as [3, 2]")
        return value

    @property
    def leaves(self) -> int:
        """Maximum number of futures of one reply."""
        return self.samples if isinstance(self.samples, int) else math.prod(self.samples)

    @property
    def map_file(self) -> str | None:
        """classmates: the file that names them, where `classmates` is a path."""
        named = (self.model_extra or {}).get("classmates")
        return named if isinstance(named, str) else None

    @property
    def options(self) -> dict[str, Any]:
        """The options of the kind that the recipe sets."""
        values = {"samples": (self.samples, SAMPLES), "rounds": (self.rounds, ROUNDS)}
        return {name: value for name, (value, default) in values.items() if value != default} | super().options


class CreditConfig(Section):
    """Which tokens are credited with the main reward; a plain string is short for `by`."""

    model_config = ConfigDict(extra="allow")
    short_key: ClassVar[str] = "by"

    by: Words = "reply"
    """reply: one reward for the whole episode. tree: the same; in addition the policy's turns in the futures are
    trained, each future compared with its siblings of the same fork. turns: each turn gets the reward of the futures
    forked after it, or without such futures the conversation's reward, plus what the environment gave for this turn and
    later ones. Or 'my_pkg.module:Rule', whose options are further keys."""
    tokens: Literal["all", "thought", "answer"] = "all"
    """Which of the sampled tokens are trained."""
    gamma: float = Field(1.0, ge=0, le=1)
    """by=turns: discount of a turn's reward for the turn before it."""
    split: bool = False
    """by=turns: make every turn a separate training sample."""
    forks: float = Field(1.0, gt=0, le=1)
    """by=tree: the share of forks to learn from, drawn at random and weighted so that the expected update stays the
    same. Most of a step's tokens are in futures; use this if learning from all of them takes too long."""
