"""A reply and what came of it: the unit that is scored, credited and written to the run folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

from upshot.core.conversation import Conversation, Sample, Turn
from upshot.core.html import html_details, html_table, html_turns, short
from upshot.core.score import Reason, Score
from upshot.rewards.credit import Credit, Reward
from upshot.tasks.participants.tools import ACTS

NOT_SCORED = Reward(Score.missing(Reason.NOT_SCORED))


@dataclass
class Future:
    """One continuation of a reply, and its scores."""

    conversation: Conversation
    shared: int = 0
    """How many of its turns are the episode's; what follows is the future's own."""
    by: str = ""
    """Who continued the reply: 'user', a classmate's name; '' when nobody did."""
    turn: int = 0
    """After which of the policy's turns it was forked, where every turn has its own futures."""
    cut: int = 0
    """From which cut of the thought (counted from 1) a classmate continued; 0 where no thought was handed on."""
    span: tuple[int, int] | None = None
    """Which tokens of the episode's ids the continuation saw of the reply; None: all that was said."""
    missing: str | None = None
    """Why this future could not be played to its end; its scores are then missing for the same reason."""
    scores: Mapping[str, Score] = field(default_factory=dict)
    path: tuple[int, ...] = ()
    """Which way it took at each fork, counted from 0; () where there are no forks."""
    forks: tuple[int, ...] = ()
    """How many turns had been taken at each of those forks; () where it was continued nowhere."""


@dataclass
class Branch:
    """What the policy said in a future between two forks. Its siblings went on from the same words."""

    conversation: Conversation
    """From the opening to the end of the branch."""
    path: tuple[int, ...]
    """Which way was taken at each fork on the way to it; the futures that begin so run through it."""
    start: int
    """How many turns had been taken at its fork."""
    reward: Reward
    """Of all futures that run through it."""
    credit: Credit
    """Of its own tokens; those before it are the reply's, or another branch's."""
    share: float = 1.0
    """What it counts for beside the reply: one over the siblings at each fork on the way."""
    advantages: Sequence[float | None] = ()
    """One per credit span; () where it has no siblings to be compared with."""

    @property
    def outcome(self) -> Score:
        """What it is compared by."""
        return self.reward.total


@dataclass
class Rollout:
    """A trained episode with its futures, reward, credit and advantage."""

    conversation: Conversation
    """The episode; its last turn is the reply that the futures continue."""
    group: int = 0
    """Replies to the same prompt share a group."""
    turn_snapshots: list[Conversation] = field(default_factory=list)
    """The episode as it stood after each of the policy's turns."""
    futures: list[Future] = field(default_factory=list)
    reward: Reward = field(default_factory=lambda: NOT_SCORED)
    counted: Score | None = None
    """What the reward counts as, if the policy made it or a part of it missing (`rollout/blame.py`)."""
    baselines: Mapping[str, Sequence[Score]] = field(default_factory=dict)
    """What each classmate reaches without the thought."""
    credit: Credit | None = None
    advantages: Sequence[float | None] = ()
    """One per credit span; None where the reply left the statistics."""
    siblings: list[list[Branch]] = field(default_factory=list)
    """With credit along the tree: the branches of each fork below the reply that `credit.forks` draws."""
    forks: int = 0
    """How many forks there are below the reply, including those that `credit.forks` leaves out."""
    other_paths: list[Branch] = field(default_factory=list)
    """If a program played the episode: what the policy said in contexts other than the conversation's (edited,
    compacted, a second agent's). They are parts of the episode, and earn what it earns."""

    @property
    def outcome(self) -> Score:
        """The value by which replies are compared: the reward, or what it counts as."""
        return self.counted or self.reward.total

    def paths(self) -> Iterator[Conversation]:
        """The episode in each of its contexts, each from its opening on."""
        yield self.conversation
        yield from [path.conversation for path in self.other_paths]

    def samples(self) -> Iterator[Sample]:
        """All that the policy sampled in the episode, each once."""
        yield from self.conversation.samples()
        for path in self.other_paths:
            yield from [sample for _, sample in path.conversation.places(path.start)]

    def to_dict(
        self, step: int, groups: Mapping[str, str] | None = None, spell: Callable[[Sequence[int]], str] | None = None
    ) -> dict[str, Any]:
        """The line of `rollouts.jsonl`; `spell` makes text of the ids of each span, where there are several."""
        # The other contexts of a program's episode: from `start` on nothing of them stands in "messages".
        paths = [
            {"key": path.conversation.key, "start": path.start, "messages": turns_to_list(path.conversation.turns)}
            for path in self.other_paths
        ]
        spans = self.credit.spans if self.credit else ()
        ids = self.conversation.ids if spell is not None and len(spans) > 1 else []
        return (
            {
                "step": step,
                "row": self.conversation.row.id,
                "source": self.conversation.row.source,
                "goal": self.conversation.row.goal,
                "reference": self.conversation.row.reference,
                "group": self.group,
                "key": self.conversation.key,
                "seed": self.conversation.seed,
                "opening": len(self.conversation.row.messages),
                "messages": turns_to_list(self.conversation.turns),
                "ended": self.conversation.ended,
                "futures": [self._future_to_dict(future) for future in self.futures],
                "reward": reward_to_dict(self.reward)
                | {"parts": _scores_to_dict(self.credit.parts if self.credit else {})},
                "credit": [
                    {"start": span.start, "stop": span.stop, "parts": list(span.parts), "advantage": advantage}
                    | ({"text": spell(ids[span.start : span.stop])} if spell is not None and ids else {})
                    for span, advantage in zip_longest(spans, self.advantages)
                ],
                "groups": dict(groups or {}),
            }
            | _environment(self.conversation)
            | ({"other_paths": paths} if paths else {})
        )

    def _repr_html_(self) -> str:
        """For notebooks: the conversation, the reward by metric, and each future at a click."""
        rows = [(name, score.value, str(score.reason or "")) for name, score in self.reward.means.items()]
        total = self.reward.total
        futures = [
            html_details(
                f"future {number}: " + ", ".join(f"{name} {short(score.value)}" for name, score in one.scores.items()),
                html_turns((t.message.role, t.message.content) for t in one.conversation.turns[one.shared :]),
            )
            for number, one in enumerate(self.futures, 1)
        ]
        turns = html_turns((turn.message.role, turn.message.content) for turn in self.conversation.turns)
        table = html_table([("reward", total.value, str(total.reason or "")), *rows], ("", "value", "missing"))
        return turns + table + "".join(futures)

    def _future_to_dict(self, future: Future) -> dict[str, Any]:
        """A future for the transcript: with what is new in it, where it branched off, and what its branches earned
        beside their siblings."""
        branches: list[dict[str, Any]] = []
        for branch in chain.from_iterable(self.siblings):
            if future.path and future.path[: len(branch.path)] == branch.path:
                present = [advantage for advantage in branch.advantages if advantage is not None]
                spans = zip_longest(branch.credit.spans, branch.advantages)
                branches.append(
                    {
                        "start": branch.start,
                        "reward": branch.reward.total.value,
                        "advantage": math.fsum(present) / len(present) if present else None,  # one number but for ppo
                        "spans": [[span.start, span.stop, advantage] for span, advantage in spans],
                    }
                )
        new = future.conversation.turns[future.shared :]
        row = future.conversation.row.id
        return {
            "key": future.conversation.key,
            "seed": future.conversation.seed,
            **({"row": row} if row != self.conversation.row.id else {}),
            **{name: getattr(future, name) for name in ("shared", "by", "turn", "cut")},
            "span": list(future.span) if future.span else None,
            "messages": turns_to_list(new, trained=False),
            "ended": future.conversation.ended,
            "missing": future.missing,
            "scores": _scores_to_dict(future.scores),
            **({"acts": acts} if (acts := future.conversation.session.get(ACTS)) else {}),
            **({"path": list(future.path), "forks": list(future.forks)} if len(future.path) > 1 else {}),
            **({"branches": branches} if branches else {}),
        }


def _environment(conversation: Conversation) -> dict[str, Any]:
    """What an environment decided by itself, which no metric can find out again."""
    decided: dict[str, Any] = {}
    if isinstance(conversation.score, Score):
        decided["score"] = conversation.score.to_dict()
    if conversation.turn_scores:
        decided["turns"] = _scores_to_dict(conversation.turn_scores)
    if acts := conversation.session.get(ACTS):
        decided["acts"] = acts
    return {"environment": decided} if decided else {}


def _scores_to_dict(scores: Mapping[Any, Score]) -> dict[str, Any]:
    return {str(name): score.to_dict() for name, score in scores.items()}


def reward_to_dict(reward: Reward) -> dict[str, Any]:
    """A reward's breakdown for the transcript."""
    return {
        "total": reward.total.to_dict(),
        "terms": _scores_to_dict(reward.terms),
        "means": _scores_to_dict(reward.means),
        "extrinsic": reward.extrinsic,
        "intrinsic": reward.intrinsic,
    }


def turns_to_list(turns: Iterable[Turn], trained: bool = True) -> list[dict[str, Any]]:
    """Turns for the transcript."""
    out = []
    for turn in turns:
        sample = {} if turn.sample is None else {"tokens": len(turn.sample.ids), "finish": turn.sample.finish}
        note = {"note": dict(turn.note)} if turn.note else {}
        out.append({**turn.message.to_dict(), "trained": trained and turn.sample is not None, **sample, **note})
    return out
