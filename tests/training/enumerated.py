"""A policy small enough to enumerate, played through the real player.

The policy is a table: what it heard last → two words. The user is a table, too. Every choice made while a step is
played has a place (which conversation, which turn), and every row of the step is one way of making all choices: bit n
of the row's number is the choice at place n. So one call of `play_step` plays everything that can happen, with known
probabilities. If a conversation never reaches a place, several rows are identical.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from upshot.config.recipe import CreditConfig, TrainConfig
from upshot.core.conversation import Conversation, Message, Row, Sample, Turn
from upshot.core.score import Reason, Score
from upshot.rewards.credit import MetricWeight
from upshot.rewards.metric import Metric
from upshot.rollout.credit import rules
from upshot.rollout.episode import Policy
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import RolloutContext, play_step
from upshot.rollout.reply import Rollout
from upshot.tasks.participants.base import Observation, Participant
from upshot.training.learner.batch import Datum
from upshot.training.loops import rl

OPENING = 9
THETA = {OPENING: (0.2, -0.4), 0: (0.5, 0.1), 1: (-0.3, 0.6)}
"""By the word heard last: the logits of the policy's two words."""
USER = {0: (0.7, 0.3), 1: (0.4, 0.6)}
"""By the policy's word: the probabilities of the user's two words."""
ECHO = {0: (1.0, 0.0), 1: (0.0, 1.0)}
Words = tuple[int, ...]
"""Policy, user, policy, user, policy …"""
Gradient = dict[tuple[int, int], float]
"""The gradient by state and word, with respect to the policy's logits."""


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities of the words."""
    total = sum(map(math.exp, logits))
    return [math.exp(x) / total for x in logits]


def worth(words: Words) -> float:
    """The reward of a conversation: any function of all its words, with few values, so that few means are different."""
    return random.Random(repr(words)).choice((-0.5, 0.0, 1.0))


def words_of(conversation: Conversation) -> Words:
    """What was said after the opening."""
    return tuple(int(turn.message.content) for turn in conversation.turns[1:])


class Choices:
    """Makes the choices of every row as its number says, and records their probabilities."""

    def __init__(self, places: int) -> None:
        self.count = places
        self.places: dict[str, int] = {}
        self.chance: dict[str, dict[str, float]] = {}
        self.by_seed: dict[int, Conversation] = {}

    def rows(self) -> list[Row]:
        """One row for every way of choosing."""
        return [Row(str(number), (Message("user", str(OPENING)),)) for number in range(2**self.count)]

    def choose(self, conversation: Conversation, chances: Sequence[float]) -> int:
        """The choice at this turn of a conversation; a certain outcome takes no place."""
        self.by_seed[conversation.seed] = conversation
        return self._choose(conversation, len(conversation.turns), chances)

    def _choose(self, conversation: Conversation, when: object, chances: Sequence[float]) -> int:
        if max(chances) == 1:
            return chances.index(max(chances))
        place = f"{conversation.key.partition('#')[2]} {when}"
        bit = self.places.setdefault(place, len(self.places))
        assert bit < self.count, f"more than {self.count} choices"
        made = int(conversation.row.id) >> bit & 1
        self.chance.setdefault(conversation.row.id, {})[place] = chances[made]
        return made

    def draw_forks(self, part: float) -> AbstractContextManager[Any]:
        """Inside this context, which forks are drawn (`credit.forks`) is one more choice instead of a matter of
        seeds."""

        def seed(of: int, *path: object) -> int:
            left_out = self._choose(self.by_seed[of], path, (part, 1 - part))
            return 2**63 - 1 if left_out else 0

        return patch.object(rules, "derive_seed", seed)

    def weight(self, row: str) -> float:
        """The probability of all choices of a row."""
        made = self.chance.get(row, {})
        return math.prod(made.values()) / 2 ** (self.count - len(made))


class TablePolicy(Policy):
    """Says one of two words, depending on what it heard last."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices

    async def reply(self, conversation: Conversation, role: str = "policy") -> Turn:
        """One word, which is one token after one token of context."""
        heard = int(conversation.turns[-1].message.content)
        chances = softmax(THETA[heard])
        word = self.choices.choose(conversation, chances)
        return conversation.say(
            Message("assistant", str(word)), Sample((heard,), (word,), (math.log(chances[word]),), "stop")
        )


class TableUser(Participant):
    """Answers by a table; `ends`: the words after which it leaves, `earns`: what a turn earned."""

    def __init__(
        self,
        choices: Choices,
        table: Mapping[int, Sequence[float]] = USER,
        ends: Callable[[Words], bool] = lambda words: False,
        earns: Callable[[Words], float] | None = None,
    ) -> None:
        self.choices, self.table, self.ends, self.earns = choices, table, ends, earns

    async def observe(self, conversation: Conversation) -> Observation:
        """The next word."""
        words = words_of(conversation)
        said = Message("user", str(self.choices.choose(conversation, self.table[words[-1]])))
        score = Score(self.earns(words)) if self.earns is not None else None
        return Observation((said,), done=self.ends(words), score=score)


class Worth(Metric):
    """What a conversation is worth; `fails`: the probability that the judge cannot be reached."""

    def __init__(self, function: Callable[[Words], float] = worth, fails: float = 0.0) -> None:
        self.function, self.fails = function, fails
        self.choices = Choices(0)

    async def score(self, conversation: Conversation) -> Score:
        """By all that was said."""
        if self.fails and self.choices.choose(conversation, (1 - self.fails, self.fails)):
            return Score.missing(Reason.CONNECTION)
        return Score(self.function(words_of(conversation)))


def played(
    places: int,
    samples: int | Sequence[int] = 1,
    rounds: int = 0,
    table: Mapping[int, Sequence[float]] = USER,
    credit: CreditConfig | None = None,
    metric: Worth | None = None,
    clamp: tuple[float, float] | None = None,
    max_turns: int = 1,
    **user: Callable[[Words], float],
) -> list[tuple[Rollout, float]]:
    """All possible results of a reply with their probabilities, played through `play_step` at once."""
    choices = Choices(places)
    person = TableUser(choices, table, **user)  # type: ignore[arg-type]
    metric = metric or Worth()
    metric.choices = choices
    futures = Talk({"m": metric}, {"m": MetricWeight(1.0, clamp)}, person, samples, rounds, credit)
    environment = person if max_turns > 1 else None
    context = RolloutContext(TablePolicy(choices), futures, environment, max_turns=max_turns, concurrency=10**6)
    with choices.draw_forks(credit.forks if credit is not None else 1.0):
        groups = asyncio.run(play_step(context, choices.rows(), 1, 0))
    found = [(reply, choices.weight(reply.conversation.row.id)) for group in groups for reply in group]
    assert len(choices.places) == places and math.isclose(sum(weight for _, weight in found), 1)
    return found


class Sampled:
    """Not a learner; it is never called."""

    def __init__(self, **config: object) -> None:
        self.config = TrainConfig.model_validate(config)

    def logprobs(self, data: Sequence[Datum], reference: bool = False) -> list[list[float]]:
        """Never called."""
        raise AssertionError

    values = logprobs


def zero() -> Gradient:
    """A zero gradient."""
    return dict.fromkeys(itertools.product(THETA, (0, 1)), 0.0)


def add_logprob(gradient: Gradient, heard: int, said: int, times: float) -> None:
    """Add the gradient of the log-probability of a word."""
    for word, p in enumerate(softmax(THETA[heard])):
        gradient[heard, word] += times * ((word == said) - p)


def estimate(groups: Sequence[Sequence[tuple[Rollout, float]]], advantage: Any = "rloo") -> Gradient:
    """What groups contribute, each reply with its weight: advantage × share × ∇ log p of every trained token."""
    weight = weights_by_source([outcome for group in groups for outcome in group])
    units, _ = rl.training_data(_sampled(json.dumps(advantage)), [[reply for reply, _ in group] for group in groups])
    out = zero()
    for datum in itertools.chain(*units):
        for at in datum.places:
            times = weight[id(datum.source)] * datum.share * datum.advantages[at]
            add_logprob(out, datum.ids[at - 1], datum.ids[at], times)
    return out


def weights_by_source(outcomes: Sequence[tuple[Rollout, float]]) -> dict[int, float]:
    """The weight of each reply, by the ids of the reply and its branches."""
    of_replies = {id(reply): weight for reply, weight in outcomes}
    below = [(branch, weight) for reply, weight in outcomes for fork in reply.siblings for branch in fork]
    return of_replies | {id(branch): weight for branch, weight in below}


@functools.cache
def _sampled(advantage: str) -> Sampled:
    return Sampled(advantage=json.loads(advantage))


def mean_estimate(outcomes: Sequence[tuple[Rollout, float]], group_size: int, advantage: Any = "rloo") -> Gradient:
    """The mean contribution over all possible groups."""
    out = zero()
    for group in itertools.product(outcomes, repeat=group_size):
        chance = math.prod(weight for _, weight in group) / group_size
        copies = [(copy.copy(reply), chance) for reply, _ in group]  # one outcome may be in a group twice
        for key, value in estimate([copies], advantage).items():
            out[key] += value
    return out


def merged(outcomes: Sequence[tuple[Rollout, float]]) -> list[tuple[Rollout, float]]:
    """Merge outcomes with the same words in the reply and the same reward; the reply's own term does not distinguish
    them."""
    found: dict[tuple[Words, float | None], tuple[Rollout, float]] = {}
    for reply, weight in outcomes:
        key = (words_of(reply.conversation), reply.reward.total.value)
        reply.siblings = []
        found[key] = (reply, weight + found.get(key, (reply, 0.0))[1])
    return list(found.values())


def conversations(
    rounds: int, table: Mapping[int, Sequence[float]] = USER, ends: Callable[[Words], bool] = lambda words: False
) -> Iterator[tuple[Words, float]]:
    """All conversations with their probabilities, enumerated without the player."""

    def go_on(said: Words, heard: int, left: int) -> Iterator[tuple[Words, float]]:
        for word, p in enumerate(softmax(THETA[heard])):
            now = (*said, word)
            if left == 0 or ends(now):
                yield now, p
                continue
            for answer, q in enumerate(table[word]):
                for whole, after in go_on((*now, answer), answer, left - 1) if q else ():
                    yield whole, p * q * after

    yield from go_on((), OPENING, rounds)


def exact_gradient(
    rounds: int,
    table: Mapping[int, Sequence[float]] = USER,
    reward: Callable[[Words], float] = worth,
    ends: Callable[[Words], bool] = lambda words: False,
) -> Gradient:
    """The gradient of the expected reward of a whole conversation."""
    out = zero()
    for words, chance in conversations(rounds, table, ends):
        for at in range(0, len(words), 2):
            add_logprob(out, words[at - 1] if at else OPENING, words[at], chance * reward(words))
    return out


def of(gradient: Gradient, first: bool) -> Gradient:
    """The part for the reply's own words, or for all later ones."""
    return {key: value for key, value in gradient.items() if (key[0] == OPENING) == first}
