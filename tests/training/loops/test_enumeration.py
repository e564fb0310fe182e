"""Every estimator and credit rule compared with the exact gradient, by enumerating everything through the real
player."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.training.enumerated import (
    ECHO,
    OPENING,
    THETA,
    Sampled,
    Words,
    Worth,
    add_logprob,
    conversations,
    estimate,
    exact_gradient,
    mean_estimate,
    merged,
    of,
    played,
    softmax,
    weights_by_source,
    words_of,
    worth,
    zero,
)
from upshot.config.recipe import CreditConfig
from upshot.training.learner.batch import Datum
from upshot.training.loops import ppo

TREE = CreditConfig(by="tree")


@pytest.mark.parametrize(
    ("places", "samples", "rounds", "table"),
    [(9, 4, 1, None), (7, [2, 2], 2, ECHO), (11, [2, 2], 3, ECHO), (9, 2, 2, None)],
    ids=["four samples", "nested forks", "nested forks, three rounds", "two rounds"],
)
def test_along_the_tree_rloo_is_the_exact_gradient_of_the_reply_and_of_all_later_turns(
    places: int, samples: object, rounds: int, table: object
) -> None:
    more = {} if table is None else {"table": table}
    outcomes = played(places, samples, rounds, credit=TREE, **more)  # type: ignore[arg-type]
    exact = exact_gradient(rounds, **more)  # type: ignore[arg-type]
    later = estimate(
        [[outcome] for outcome in outcomes]
    )  # a reply alone contributes nothing; what is left is the later turns
    assert of(later, first=False) == pytest.approx(of(exact, first=False), abs=1e-12)
    own = mean_estimate(merged(outcomes), 2)
    assert of(own, first=True) == pytest.approx(of(exact, first=True), abs=1e-12)


@pytest.mark.parametrize("part", [0.5, 0.2])
@pytest.mark.parametrize(
    ("places", "samples", "rounds"), [(4, 2, 1), (10, [2, 2], 2)], ids=["one fork", "nested forks"]
)
def test_a_random_subset_of_the_forks_gives_the_same_gradient(
    places: int, samples: int | list[int], rounds: int, part: float
) -> None:
    """Which forks are drawn is enumerated, too: each stands for those that were left out."""
    outcomes = played(places, samples, rounds, ECHO, CreditConfig(by="tree", forks=part))
    assert {len(reply.siblings) for reply, _ in outcomes} == set(range(reply_forks(samples) + 1))
    exact = exact_gradient(rounds, ECHO)
    later = estimate([[outcome] for outcome in outcomes])
    assert of(later, first=False) == pytest.approx(of(exact, first=False), abs=1e-12)
    own = mean_estimate(merged(outcomes), 2)
    assert of(own, first=True) == pytest.approx(of(exact, first=True), abs=1e-12)


def reply_forks(samples: int | list[int]) -> int:
    """How many forks there are below a reply."""
    return 1 if isinstance(samples, int) else 1 + samples[0]


def test_along_the_tree_centring_by_all_shrinks_both_terms_by_the_known_share() -> None:
    """A group of two and two futures: a value that is part of the subtracted mean loses half, and nothing else."""
    outcomes = played(5, 2, 1, credit=TREE)
    half = {key: value / 2 for key, value in exact_gradient(1).items()}
    later = estimate([[outcome] for outcome in outcomes], "dr-grpo")
    assert of(later, first=False) == pytest.approx(of(half, first=False), abs=1e-12)
    own = mean_estimate(merged(outcomes), 2, "dr-grpo")
    assert of(own, first=True) == pytest.approx(of(half, first=True), abs=1e-12)


def test_by_reply_the_later_turns_are_not_trained() -> None:
    """Why there is a tree: later turns of the policy affect the reward, too, but with credit by reply they are not
    trained."""
    outcomes = played(5, 2, 1)
    exact, found = exact_gradient(1), mean_estimate(merged(outcomes), 2)
    assert of(found, first=True) == pytest.approx(of(exact, first=True), abs=1e-12)
    assert not any(of(found, first=False).values()) and max(map(abs, of(exact, first=False).values())) > 0.05


def ended(words: Words) -> bool:
    """Ragged: a conversation ends as soon as the policy says 1."""
    return words[-1] == 1


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("gamma", [1.0, 0.0])
def test_by_turns_rloo_is_the_exact_gradient_also_where_episodes_end_at_different_turns(
    group_size: int, gamma: float
) -> None:
    """With gamma 0, each turn follows what it earned itself, and the outcome belongs to the last one."""

    def earns(words: Words) -> float:
        return worth((5, *words))

    outcomes = played(3, table=ECHO, credit=CreditConfig(by="turns", gamma=gamma), max_turns=3, ends=ended, earns=earns)
    assert {len(words_of(reply.conversation)) for reply, _ in outcomes} == {1, 3, 5}

    def returns(words: Words, turn: int) -> float:
        own = [earns(words[: at + 1]) for at in range(0, len(words), 2)]
        own[-1] += worth(words)
        return sum(own[turn:]) if gamma else own[turn]

    exact = zero()
    for words, chance in conversations(2, ECHO, ended):
        for turn in range(0, len(words), 2):
            add_logprob(exact, words[turn - 1] if turn else OPENING, words[turn], chance * returns(words, turn // 2))
    assert mean_estimate(outcomes, group_size) == pytest.approx(exact, abs=1e-12)


RAGGED = {"table": ECHO, "max_turns": 3, "ends": ended}
CENTRED = ["dr-grpo", {"name": "grpo", "scale": "none"}, "separated"]


@pytest.mark.parametrize("advantage", ["rloo", *CENTRED])
def test_centring_by_all_loses_one_part_in_n_and_leaving_one_out_nothing(advantage: Any) -> None:
    exact = exact_gradient(2, ECHO, ends=ended)
    factor = 1.0 if advantage == "rloo" else 2 / 3
    found = mean_estimate(played(3, **RAGGED), 3, advantage)  # type: ignore[arg-type]
    assert found == pytest.approx({key: factor * value for key, value in exact.items()}, abs=1e-12)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("advantage", ["grpo", {"name": "grpo", "scale": "step"}, "reinforce++", "gdpo"])
def test_dividing_by_the_deviation_weights_a_row_by_how_rarely_it_varies(advantage: Any, n: int) -> None:
    """Right or wrong, with one group in the step: the factor in docs/training.md, which is largest at the extremes."""
    right = Worth(lambda words: float(words[-1] == 0))
    exact = exact_gradient(0, reward=right.function)
    p = softmax(THETA[OPENING])[0]
    root = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) * math.sqrt(k * (n - k)) for k in range(n + 1))
    factor = math.sqrt((n - 1) / n**3) * root / (p * (1 - p))
    found = mean_estimate(played(1, metric=right), n, advantage)
    assert found == pytest.approx({key: factor * value for key, value in exact.items()}, rel=1e-3)


@pytest.mark.parametrize("samples", [2, 3])
def test_branches_lost_to_the_machine_shrink_the_later_term_by_the_chance_that_two_are_left(samples: int) -> None:
    q = 0.2
    outcomes = played(1 + 2 * samples, samples, 1, ECHO, TREE, Worth(fails=q))
    left = sum(math.comb(samples, k) * (1 - q) ** k * q ** (samples - k) for k in range(2, samples + 1))
    exact = of(exact_gradient(1, ECHO), first=False)
    found = of(estimate([[outcome] for outcome in outcomes]), first=False)
    assert found == pytest.approx({key: left * value for key, value in exact.items()}, abs=1e-12)


def test_with_a_clamp_replies_follow_the_clamped_mean_and_branches_their_clamped_value() -> None:
    def clamp(value: float) -> float:
        return min(max(value, -0.25), 0.5)

    outcomes = played(3, 2, 1, ECHO, TREE, clamp=(-0.25, 0.5))
    later = exact_gradient(1, ECHO, lambda words: clamp(worth(words)))
    assert of(estimate([[one] for one in outcomes]), first=False) == pytest.approx(of(later, first=False), abs=1e-12)
    exact = zero()
    for word, p in enumerate(softmax(THETA[OPENING])):
        ways = [(worth((word, word, said)), q) for said, q in enumerate(softmax(THETA[word]))]
        mean = sum(p * q * clamp((a + b) / 2) * r for (a, q), (b, r) in itertools.product(ways, repeat=2))
        add_logprob(exact, OPENING, word, mean)
    assert of(mean_estimate(merged(outcomes), 2), first=True) == pytest.approx(of(exact, first=True), abs=1e-12)
    assert of(exact, first=True) != pytest.approx(of(later, first=True), abs=1e-2), "not the same objective"


class Critic(Sampled):
    """A value head that is wrong everywhere but depends only on what was said before."""

    def values(self, data: Sequence[Datum]) -> list[list[float]]:
        return [[random.Random(repr(one.ids[:at])).gauss(0, 1) for at in range(len(one.ids))] for one in data]


@pytest.mark.parametrize("credit", [CreditConfig(), TREE], ids=["reply", "tree"])
def test_ppo_without_a_bootstrap_is_the_exact_gradient_whatever_the_value_head_says(credit: CreditConfig) -> None:
    rounds = 2 if credit is TREE else 0
    outcomes = played(7, [2, 2], 2, ECHO, credit) if rounds else played(1)
    source = Critic(method="ppo", ppo={"gae_lambda": 1.0, "whiten": False})
    weight = weights_by_source(outcomes)
    units, _ = ppo.training_data(source, [[reply] for reply, _ in outcomes])
    found = zero()
    for datum in itertools.chain(*units):
        for at in datum.places:
            times = weight[id(datum.source)] * datum.share * datum.advantages[at]
            add_logprob(found, datum.ids[at - 1], datum.ids[at], times)
    assert found == pytest.approx(exact_gradient(rounds, ECHO), abs=1e-12)
