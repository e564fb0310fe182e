"""What was said, by whom, and which token ids were sampled. Pure data, no tokenizer, no torch.

A `Conversation` is a path of turns. Forks share the turns (and so the token ids) of their prefix. A policy turn keeps
the exact ids it was sampled with: `Sample.context` are the ids added to the prompt since the last sample (rendered,
loss mask 0), and `Sample.ids` the sampled ones (loss mask 1). So `conversation.ids` is what the policy saw and said,
and decoded text is never encoded again.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any

from upshot.core.errors import UserError
from upshot.core.score import Score

Tools = Sequence[Mapping[str, Any]]
"""Descriptions of tools, in the form of OpenAI's API."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message, in the form of an OpenAI chat message."""

    role: str
    """system, user, assistant or tool."""
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """OpenAI tool calls: {"id", "type": "function", "function": {"name", "arguments"}}."""
    tool_call_id: str | None = None
    """On a tool message: the call it answers."""
    name: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The message as chat templates and endpoints expect it."""
        calls = list(map(dict, self.tool_calls)) or None
        more = {"tool_calls": calls, "tool_call_id": self.tool_call_id, "name": self.name}
        present = {key: value for key, value in more.items() if value is not None}
        return {"role": self.role, "content": self.content, **present}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Message:
        """A message from its dictionary form; content None (a bare tool call) becomes the empty string."""
        calls, content = tuple(data.get("tool_calls") or ()), text_of(data.get("content"), "message")
        return cls(data["role"], content, calls, data.get("tool_call_id"), data.get("name"))


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens of one policy turn, exactly as they were sampled."""

    context: tuple[int, ...]
    """Ids put before the sampled ones since the previous sample: rendered messages and the generation prompt."""
    ids: tuple[int, ...]
    """The sampled ids, the end-of-turn token included when the model produced it."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled id under softmax(logits / temperature), before any top-k/top-p/min-p cut."""
    finish: str
    """stop (the model ended its turn) or length (cut at the limit)."""
    version: int = 0
    """Version of the weights that sampled it; with `train.async_steps`, how many steps those weights had taken."""
    thought: tuple[int, int] | None = None
    """The span of the thought in `ids`, without its markers; None if there is no thought."""
    answer: int = 0
    """The position in `ids` where the answer begins, which others see; `len(ids)` if the model never reached it."""

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.logprobs):
            raise ValueError(f"a sample of {len(self.ids)} ids came with {len(self.logprobs)} log-probabilities")


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and, when the policy in training sampled it, its tokens."""

    message: Message
    sample: Sample | None = None
    note: Mapping[str, Any] = field(default_factory=dict)
    """What the speaker thought or measured (a simulated user's hidden thought, flags); shown in reports, never
    rendered."""


@dataclass(frozen=True)
class Row:
    """One row of a task's data: how the conversation opens and what is hidden from the policy."""

    id: str
    messages: tuple[Message, ...]
    """The opening the policy sees."""
    goal: Any = None
    """What the simulated user wants; the policy never sees it."""
    reference: Any = None
    """The ground truth a verifier or judge compares with."""
    source: str = ""
    """The data source: which task or verifier the row belongs to."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Anything else: difficulty, unit tests, persona, groups for plots."""


def derive_seed(seed: int, *keys: object) -> int:
    """A new 63-bit seed from a seed and a path of keys; the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr((seed, *keys)).encode(), digest_size=8).digest(), "big") >> 1


class Conversation:
    """A path of turns with the state that belongs to it: row, seed, random stream, session."""

    __slots__ = ("_rng", "counts", "ended", "key", "row", "score", "seed", "session", "turn_scores", "turns")

    def __init__(self, row: Row, seed: int = 0, key: str = "", turns: tuple[Turn, ...] | None = None) -> None:
        self.row, self.seed = row, seed
        self.key = key or row.id
        self.turns: tuple[Turn, ...] = tuple(map(Turn, row.messages)) if turns is None else turns
        self.session: dict[str, Any] = {}
        """Private state of the participants of this conversation (environment session, simulated user's memory)."""
        self.score: Score | float | None = None
        """What the environment decided at the end; None: it is left to the verifier."""
        self.turn_scores: Mapping[int, Score] = {}
        """Scores that the environment gave for single policy turns, by turn number from 0."""
        self.counts: Mapping[str, float] = {}
        """What participants counted, summed over their observations."""
        self.ended: str | None = None
        """Why it ended: 'user', 'done', 'turns', 'length' …; None while it can continue."""
        self._rng: random.Random | None = None

    def __repr__(self) -> str:
        return f"Conversation({self.key!r}, {len(self.turns)} turns)"

    @property
    def rng(self) -> random.Random:
        """The conversation's own random stream."""
        if self._rng is None:
            self._rng = random.Random(derive_seed(self.seed, "rng"))
        return self._rng

    @property
    def messages(self) -> list[Message]:
        """Everything said so far."""
        return [turn.message for turn in self.turns]

    def say(self, message: Message, sample: Sample | None = None, note: Mapping[str, Any] | None = None) -> Turn:
        """Append a turn and return it."""
        turn = Turn(message, sample, note or {})
        self.turns = (*self.turns, turn)
        return turn

    def count(self, numbers: Mapping[str, float]) -> None:
        """Add numbers to `counts`, in a new mapping: forks share the old one."""
        self.counts = {**self.counts, **{name: self.counts.get(name, 0.0) + new for name, new in numbers.items()}}

    def fork(self, *path: object) -> Conversation:
        """A copy that shares all turns so far and continues independently, with its own random stream.

        The session is deep-copied, so the participants of a fork never write into a sibling's state; only objects that
        cannot be copied (a lock, a connection) are shared.
        """
        key = "/".join([self.key, *map(str, path)])
        twin = Conversation(self.row, derive_seed(self.seed, *path), key, self.turns)
        twin.session = {name: _copy(value) for name, value in self.session.items()}
        twin.score, twin.turn_scores, twin.counts = self.score, self.turn_scores, self.counts
        return twin

    def samples(self) -> Iterator[Sample]:
        """The policy's samples, in order."""
        return (turn.sample for turn in self.turns if turn.sample is not None)

    @property
    def ids(self) -> list[int]:
        """All ids of the policy's context up to and including its last sample."""
        return list(chain.from_iterable([sample.context + sample.ids for sample in self.samples()]))

    @property
    def mask(self) -> list[int]:
        """Loss mask beside `ids`: 1 exactly where the policy sampled."""
        return list(chain.from_iterable([[0] * len(s.context) + [1] * len(s.ids) for s in self.samples()]))

    @property
    def logprobs(self) -> list[float]:
        """Sampling log-probabilities beside `ids`, 0.0 where nothing was sampled."""
        return list(chain.from_iterable([(0.0,) * len(s.context) + s.logprobs for s in self.samples()]))

    def places(self, first: int = 0) -> Iterator[tuple[int, Sample]]:
        """The policy's samples from turn `first` on, each with the position of its first sampled id in `ids`."""
        at = 0
        for number, turn in enumerate(self.turns):
            if turn.sample is not None:
                at += len(turn.sample.context)
                if number >= first:
                    yield at, turn.sample
                at += len(turn.sample.ids)

    @property
    def unrendered(self) -> list[Message]:
        """Messages since the last sample, which the next prompt still has to render."""
        pending = takewhile(lambda turn: turn.sample is None, reversed(self.turns))
        return [turn.message for turn in pending][::-1]

    def last(self, role: str) -> Message | None:
        """The latest message of a role."""
        return next((turn.message for turn in reversed(self.turns) if turn.message.role == role), None)


def _copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except (TypeError, copy.Error):
        return value


def text_of(content: Any, where: str) -> str:
    """A message's content as text, which OpenAI's API may split into parts; parts of other types are refused."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise UserError(f"{where}.content is {type(content).__name__}; give text, or a list of parts of type text")
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = f"of type '{part['type']}'" if isinstance(part, Mapping) and "type" in part else "without a type"
            raise UserError(f'{where}.content.{i} is a part {kind}; only {{"type": "text", "text": "…"}} can be read')
    return "".join(part["text"] for part in content)


def messages_from(data: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Messages from a list of dictionaries."""
    return tuple(Message.from_dict(item) for item in data)
