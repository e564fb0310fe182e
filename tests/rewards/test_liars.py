"""A policy that fools its tests in the plain check learns nothing from it: a bandit rewarded with our verdicts."""

from __future__ import annotations

import math
import random

from tests.rewards.test_advantages import credits
from upshot.rewards.advantages.grouped import estimator
from upshot.sandbox.outcome import Outcome, TestResult
from upshot.tasks.verifiers.code import share_passed
from upshot.tasks.verifiers.profile import CheckKind, RowProfile, decide

SEEN = {"right": Outcome.PASSED, "wrong": Outcome.WRONG, "lie": Outcome.UNCONFIRMED}
"""What the sandbox reports for each kind of reply."""
DECIDABLE = RowProfile((CheckKind.DECIDABLE,), "reference")
GROUP, ROWS, STEPS, RATE = 8, 6, 100, 4.0
HARD, SOLVED_EASY, SOLVED_HARD = 0.3, 0.8, 0.15


def share_of_liars(seed: int, missing: bool = False) -> float:
    """Final share of lies among failing replies, which start at 5 %. `missing`: as if lies had no score."""
    dice, logit, compare = random.Random(seed), math.log(0.05 / 0.95), estimator("grpo")

    def chance() -> float:
        return 1 / (1 + math.exp(-logit))

    for _ in range(STEPS):
        slope = 0.0
        solved = [SOLVED_HARD if dice.random() < HARD else SOLVED_EASY for _ in range(ROWS)]
        fails = [["lie" if dice.random() < chance() else "wrong" for _ in range(GROUP)] for _ in solved]
        groups = [["right" if dice.random() < p else f for f in some] for p, some in zip(solved, fails, strict=True)]
        for acts in groups:
            values = [share_passed(decide([TestResult(SEEN[act])], DECIDABLE), "code").value for act in acts]
            values = [None if missing and act == "lie" else v for v, act in zip(values, acts, strict=True)]
            for act, (advantage,) in zip(acts, compare([credits(values)])[0], strict=True):
                if act != "right" and advantage is not None:
                    slope += advantage * ((act == "lie") - chance()) / (GROUP * ROWS)
        logit += RATE * slope
    return chance()


def test_the_share_of_lies_does_not_grow_if_the_judge_can_decide() -> None:
    shares = [share_of_liars(seed) for seed in range(4)]
    assert sum(shares) / len(shares) < 0.1, shares


def test_the_share_of_lies_would_grow_if_a_lie_had_no_score() -> None:
    assert share_of_liars(0, missing=True) > 0.5
