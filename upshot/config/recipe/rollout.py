"""How a conversation unfolds, how it is continued, and which of its tokens earn the reward."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator

from upshot.config.bounds import Words
from upshot.config.recipe.base import Named, Section

SAMPLES, ROUNDS = 1, 0
"""How often, and for how many rounds, a reply is continued where nothing else is said."""


class AgentConfig(Section):
    """Somebody else's program that plays the episodes; a text alone is `program`."""

    short_key: ClassVar[str] = "program"

    program: Words
    """A command, started for every row, or 'my_pkg.module:function', called for every row. Either asks the policy at
    the OpenAI address of its own conversation."""
    outcome: Literal["task", "exit"] = "task"
    """What an episode is worth that posts no reward. task: the task's verdict on the last reply. exit: 1 where the
    command ends with status 0, 0 where it ends with another."""
    seconds: float = Field(600.0, gt=0)
    """Most seconds of one episode; one that takes longer is ended and missing."""
    calls: int = Field(128, ge=1)
    """Most calls of the policy in one episode; more are refused."""
    at_once: int = Field(64, ge=1)
    """Most agents under way at once."""


class EpisodeConfig(Section):
    """How the trained part of a conversation unfolds."""

    agent: AgentConfig | None = None
    """Who plays the episodes: a program that calls the policy as often as it likes. None: policy and environment take
    turns."""
    max_turns: int = Field(1, ge=1)
    """Policy turns, with the task's environment between them."""
    with_user: bool = False
    """Whether the simulated user (`futures.user`, else the task's own) answers between them instead; calls of the
    task's tools are still answered by the tools."""
    max_tokens: int = Field(512, ge=1)
    """Most tokens of one policy turn, in the futures too."""
    temperature: float = Field(1.0, ge=0)
    """Of the policy, in the futures too."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus cut; 1 keeps all. Training uses the log-probabilities before the cut."""
    top_k: int = Field(0, ge=0)
    """Keep the k likeliest tokens; 0 keeps all. Training uses the log-probabilities before the cut."""
    system: str = ""
    """A system prompt for the policy, put before the row's own messages."""
    long_prompts: Literal["error", "filter", "truncate"] = "error"
    """Rows whose prompt leaves no room for a reply in the model's context. error: refused before the run begins.
    filter: left out. truncate: the beginning of their longest message is left out."""
    think: tuple[Words, Words] | None = ("<think>", "</think>")
    """Markers around the policy's thoughts, which nobody else hears; None: everything it writes is said."""


class FuturesConfig(Named):
    """How a reply is continued before it is scored; further keys are options of the kind of future."""

    name: str = "talk"
    """talk: a simulated user and the policy talk on. classmates: other models finish the thought. none: nobody does.
    Or 'my_pkg.module:Kind'."""
    samples: Annotated[int, Field(ge=1)] | Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] = SAMPLES
    """Futures per reply; classmates: per classmate. talk: of a list such as [3, 2] the first forks the reply, and each
    number after it every future once more at its next round."""
    rounds: int = Field(ROUNDS, ge=0)
    """talk: rounds (a user turn and a policy turn each) that a future may last; 0 scores the reply itself."""
    user: Named | None = None
    """talk: the simulated user; None: the task's own."""

    @field_validator("samples", mode="before")
    @classmethod
    def _number_or_numbers(cls, value: Any) -> Any:
        """Say what is allowed in one sentence: of two types pydantic would tell the faults of both."""
        numbers = value if isinstance(value, list) else [value]
        if not numbers or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in numbers):
            raise ValueError("take a whole number of 1 or more, or a list of such, as [3, 2]")
        return value

    @property
    def leaves(self) -> int:
        """Most futures of one reply."""
        return self.samples if isinstance(self.samples, int) else math.prod(self.samples)

    @property
    def map_file(self) -> str | None:
        """classmates: the file that names them, where `classmates` is a path."""
        named = (self.model_extra or {}).get("classmates")
        return named if isinstance(named, str) else None

    @property
    def options(self) -> dict[str, Any]:
        """The options of the kind, as far as the recipe sets them."""
        own = {"samples": self.samples, "rounds": self.rounds}
        default = type(self).model_fields
        return {k: v for k, v in own.items() if v != default[k].default} | dict(self.model_extra or {})


class CreditConfig(Section):
    """Which tokens earn the main reward; a plain string is short for `by`."""

    model_config = ConfigDict(extra="allow")
    short_key: ClassVar[str] = "by"

    by: Words = "reply"
    """reply: one reward for the whole episode. tree: the same, and what the policy says in the futures is trained too,
    each future beside its siblings of the same fork. turns: each turn earns the reward of futures forked after it, or
    else what the conversation came to, and what the environment gave for it and for the turns after it.
    Or 'my_pkg.module:Rule', whose options stand beside it."""
    tokens: Literal["all", "thought", "answer"] = "all"
    """Which of the sampled tokens are trained."""
    gamma: float = Field(1.0, ge=0, le=1)
    """by turns: what a turn's reward counts for the turn before it."""
    split: bool = False
    """by turns: every turn is a training sample of its own."""
    forks: float = Field(1.0, gt=0, le=1)
    """by tree: the share of the forks that is learned from, drawn at random and weighed accordingly. Futures are most
    of what a step samples; where learning from all of them takes too long, a part of them has the same mean."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of a rule of the user's own."""
        return dict(self.model_extra or {})
