"""The gradient of classmates' credit, by playing every thought, answer and classmate's answer through the real player.

A thought is two letters, an answer one digit, and each depends on what was thought before. The classmate is right or
wrong by chance, more often after some thoughts than after others. The bits of a row's number are its choices.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.rollout.test_classmates import Recites, context, play
from upshot.core.conversation import Message, Row
from upshot.rewards.advantages.grouped import estimator
from upshot.rollout.reply import Rollout

BITS = 5
ROWS = [Row(str(n), (Message("user", f"case {n}."),), None, "1") for n in range(2**BITS)]
FIRST = {"": 0.6}
"""The probability of 'a' rather than 'b'."""
SECOND = {"a": 0.3, "b": 0.8}
"""The probability of 'c' rather than 'd'."""
ANSWER = {"ac": 0.7, "ad": 0.4, "bc": 0.2, "bd": 0.9}
"""The probability of the right answer."""
CLASSMATE = {"": 0.0, "a": 0.5, "b": 0.1, "ac": 0.25, "ad": 0.75, "bc": 0.6, "bd": 0.3}
"""The probability of the classmate's right answer, by the thought that it receives."""
POLICY = FIRST | SECOND | ANSWER
Gradient = dict[str, float]
"""By the thought so far: the derivative with respect to the log-odds of the first of the two choices."""
Case = tuple[str, bool, bool, bool]
"""The thought, whether the answer is right, and whether the classmate is right given half of it and all of it."""


def case(number: int) -> tuple[Case, float]:
    """What happens in a row, and how likely it is."""
    bits = [bool(number >> at & 1) for at in range(BITS)]
    first = "a" if bits[0] else "b"
    thought = first + ("c" if bits[1] else "d")
    chances = (0.6, SECOND[first], ANSWER[thought], CLASSMATE[first], CLASSMATE[thought])
    weight = 1.0
    for bit, chance in zip(bits, chances, strict=True):
        weight *= chance if bit else 1 - chance
    return (thought, bits[2], bits[3], bits[4]), weight


def number_in(text: str) -> int:
    return int(re.findall(r"case (\d+)\.", text)[-1])


def reply(text: str, seed: int) -> str:
    thought, right, _, _ = case(number_in(text))[0]
    return f"<think>{thought}</think>{int(right)}"


def answer(text: str, seed: int) -> str:
    """The classmate: wrong without any thought."""
    handed = "".join(re.findall(r"[abcd]", text.partition("<think>")[2].partition("</think>")[0]))
    _, _, half, whole = case(number_in(text))[0]
    return str(int({0: False, 1: half, 2: whole}[len(handed)]))


def outcomes(**options: Any) -> list[tuple[Rollout, Case, float]]:
    made, _ = context(reply, {"peer": Recites("peer", answer)}, **options)
    groups = play(made, ROWS)
    return [(group[0], *case(int(group[0].conversation.row.id))) for group in groups]


def add(gradient: Gradient, thought: str, right: bool, advantages: tuple[float, float, float], weight: float) -> None:
    """Add the contributions for the two letters and the answer."""
    made = (("", thought[0] == "a"), (thought[0], thought[1] == "c"), (thought, right))
    for (state, chose), advantage in zip(made, advantages, strict=True):
        gradient[state] += weight * advantage * (chose - POLICY[state])


def estimated(found: list[tuple[Rollout, Case, float]]) -> Gradient:
    """The mean of what two replies contribute under `rloo`."""
    out = dict.fromkeys(POLICY, 0.0)
    estimate = estimator("rloo")
    for one, other in itertools.product(found, repeat=2):
        credit = one[0].credit
        assert credit is not None
        spans = dict(zip(credit.spans, estimate([[credit, other[0].credit]])[0][0], strict=True))
        ((at, sample),) = one[0].conversation.places()
        assert sample.thought is not None and sample.thought[1] - sample.thought[0] == 2
        places = (at + sample.thought[0], at + sample.thought[0] + 1, at + sample.answer)
        at_place = [next(v for s, v in spans.items() if s.start <= p < s.stop) for p in places]
        add(out, one[1][0], one[1][1], tuple(v or 0.0 for v in at_place), one[2] * other[2])  # type: ignore[arg-type]
    return out


def exact(worth: Callable[[Case], tuple[float, float, float]]) -> Gradient:
    """The gradient of the objective of each of the two letters and the answer."""
    out = dict.fromkeys(POLICY, 0.0)
    for number in range(2**BITS):
        happened, weight = case(number)
        add(out, happened[0], happened[1], worth(happened), weight)
    return out


def alike(worth: Callable[[Case], float]) -> Callable[[Case], tuple[float, float, float]]:
    return lambda happened: (worth(happened),) * 3


@pytest.mark.parametrize("reward", ["vanilla", "without-thought"])
def test_without_a_gate_the_credit_of_thought_and_answer_is_the_exact_gradient(reward: str) -> None:
    """An answer comes after the thought: the classmates' part does not depend on it."""
    found = estimated(outcomes(reward=reward))
    assert found == pytest.approx(exact(alike(lambda it: it[1] + it[3])), abs=1e-12)


@pytest.mark.parametrize(("gate", "wrong"), [("no", 0), ("neg", -1)])
def test_with_a_gate_the_answer_gets_credit_for_opening_it_only_if_all_tokens_do(gate: str, wrong: int) -> None:
    def worth(it: Case) -> float:
        return it[1] + it[3] * (1 if it[1] else wrong)

    name = f"{gate}_classmate_when_main_incorrect"
    kept = estimated(outcomes(gate=name))
    assert kept == pytest.approx(exact(lambda it: (worth(it), worth(it), it[1])), abs=1e-12)
    assert estimated(outcomes(gate=name, tokens="all")) == pytest.approx(exact(alike(worth)), abs=1e-12)


def test_stepwise_each_stretch_follows_only_its_own_gain() -> None:
    """The gains add up to the whole; the first stretch does not see how much it lowers the second one's gain."""
    found = estimated(outcomes(reward="steps", cuts=2))
    assert found == pytest.approx(exact(lambda it: (it[1] + it[2], it[1] + it[3] - it[2], it[1])), abs=1e-12)
    whole = exact(alike(lambda it: it[1] + it[3]))
    assert {key: found[key] for key in found if key} == pytest.approx({key: whole[key] for key in found if key})
    assert found[""] != pytest.approx(whole[""], abs=1e-2)
    assert estimated(outcomes(reward="steps", cuts=2, tokens="all")) == pytest.approx(whole, abs=1e-12)
