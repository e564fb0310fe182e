"""Word problems made by the project, in a language of some 150 words: what a model of half a million weights can learn.

One or two steps, small numbers, one token a number. The demonstrations are flawed on purpose: some have no `####` line,
some add up wrongly, and only some of them heed the feedback that follows. So reinforcement learning has something to
improve.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from upshot.core.conversation import Message, derive_seed
from upshot.tasks.participants.feedback import Fault

NAMES = ("anna", "ben", "carla", "david", "emma", "felix", "grace", "henry")
THINGS = ("apples", "books", "coins", "pens", "cards", "stones", "shells", "stamps")
GAIN = ("buys", "finds", "gets")
LOSE = ("loses", "sells", "drops")
LARGEST = 12
FaultFinder = Callable[[str], Fault | None]
"""What is wrong with a reply, if anything."""
WORDS = "has . then more how many does have now ? doubles them #### + - * = so the answer is"


@dataclass(frozen=True)
class ArithmeticProblem:
    """A question, its steps as (left, operator, right, result), and the answer."""

    question: str
    steps: tuple[tuple[int, str, int, int], ...]

    @property
    def answer(self) -> int:
        """The number after the last step."""
        return self.steps[-1][3]

    @property
    def difficulty(self) -> str:
        """How many steps it takes."""
        return "1 step" if len(self.steps) == 1 else f"{len(self.steps)} steps"

    def solution(self, slip: int = 0, marked: bool = True) -> str:
        """A worked answer; `slip` is added to the last result, `marked` ends it with the `####` line."""
        shown = [[str(left), op, str(right), "=", str(result)] for left, op, right, result in self.steps]
        result = max(0, self.answer + slip)
        shown[-1][-1] = str(result)
        ending = f"#### {result}" if marked else f"so the answer is {result}"
        return " . ".join(" ".join(step) for step in shown) + f" . {ending}"


def make_problem(rng: random.Random) -> ArithmeticProblem:
    """A random problem."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    have = rng.randint(2, 6)
    text = [f"{name} has {have} {thing} ."]
    steps = []
    for _ in range(rng.choice((1, 1, 2))):
        kind = rng.choice("+++---*")
        if kind == "*" and 2 * have <= LARGEST:
            steps.append((have, "*", 2, 2 * have))
            text.append(f"then {name} doubles them .")
        elif kind == "-" and have > 1:
            part = rng.randint(1, min(have, 4))
            steps.append((have, "-", part, have - part))
            text.append(f"then {name} {rng.choice(LOSE)} {part} {thing} .")
        else:
            part = rng.randint(1, max(1, min(4, LARGEST - have)))
            steps.append((have, "+", part, have + part))
            text.append(f"then {name} {rng.choice(GAIN)} {part} more {thing} .")
        have = steps[-1][3]
    text.append(f"how many {thing} does {name} have now ?")
    return ArithmeticProblem(" ".join(text), tuple(steps))


def problems(split: str, count: int, seed: int = 0) -> list[ArithmeticProblem]:
    """Distinct problems of a split. A question belongs to one split for good, by its own hash."""
    rng = random.Random(derive_seed(seed, "arithmetic", split))
    distinct: dict[str, ArithmeticProblem] = {}
    while len(distinct) < count:
        problem = make_problem(rng)
        if split_of_question(problem.question) == split:
            distinct.setdefault(problem.question, problem)
    return list(distinct.values())


def split_of_question(question: str) -> str:
    """Eight tenths train, one validation, one test."""
    bucket = hashlib.blake2b(question.encode(), digest_size=2).digest()[0] % 10
    return {0: "test", 1: "validation"}.get(bucket, "train")


def demonstration(
    problem: ArithmeticProblem, rng: random.Random, review: FaultFinder, flawed: float, heedless: float
) -> tuple[Message, ...]:
    """A dialogue to imitate: `flawed` of the replies have a fault, `heedless` of the answers to feedback repeat it."""
    talk = [Message("user", problem.question)]
    reply = problem.solution()
    if rng.random() < flawed:
        slip = rng.choice((-1, 1)) if rng.random() < 0.25 else 0
        reply = problem.solution(slip, marked=bool(slip) and rng.random() < 0.5)
    for _ in range(rng.choice((2, 3))):
        talk.append(Message("assistant", reply))
        fault = review(reply)
        if fault is None:
            break
        talk.append(Message("user", fault.text))
        if rng.random() >= heedless:
            reply = problem.solution()
    return tuple(talk[:-1] if talk[-1].role == "user" else talk)


def vocabulary(sentences: Sequence[str]) -> list[str]:
    """Every word of the language, those of the given sentences included."""
    words = {*WORDS.split(), *NAMES, *THINGS, *GAIN, *LOSE, *(word for s in sentences for word in s.split())}
    return sorted(words | {str(number) for number in range(2 * LARGEST + 2)})
