"""Word problems with a thought before the answer: plain steps, or the same steps in a private code.

`<think> 4 + 3 = 7 . </think> #### 7`, each on a line of its own. The demonstrations think in the code in a share of the
cases (`coded`), and both lead to the right answer: a model that learned from them can answer with thoughts that nobody
else can read. What classmates make of a thought then shows the difference.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache, cached_property

from upshot.config.bounds import Count, Share, Whole
from upshot.core.conversation import Message, Row, derive_seed
from upshot.core.thought import MARKERS
from upshot.tasks import arithmetic
from upshot.tasks.base import tasks
from upshot.tasks.verified import VerifiedTask

SIZES = {"train": 12000, "validation": 400, "test": 400}
SIGNS = ("+", "-", "*", "=")
CODE_WORDS = 48


@tasks.register("ciphers")
class Ciphers(VerifiedTask):
    """Small word problems; replies think first."""

    verifier = "gsm8k"

    def __init__(self, coded: Share = 0.8, limit: Count | None = None, split_seed: Whole = 0) -> None:
        """Make the task.

        coded: share of demonstrations whose thought is in the code. limit: maximum number of rows per split.
        """
        super().__init__(file="made", limit=limit, split_seed=split_seed)
        self.coded = coded

    @cached_property
    def _splits(self) -> dict[str, list[Row]]:
        return {split: [_row(split, n, p) for n, p in enumerate(self.problems(split))] for split in SIZES}

    def problems(self, split: str) -> list[arithmetic.ArithmeticProblem]:
        """The problems behind the rows of a split."""
        return arithmetic.problems(split, min(SIZES[split], self.limit or SIZES[split]), self.split_seed)

    def answer_text(self, row: Row) -> str:
        """The answer line."""
        return f"#### {row.reference}"

    def dialogues(self, split: str) -> Sequence[tuple[Message, ...]]:
        """Every problem with a thought, plain or coded, and the right answer."""
        out = []
        for number, problem in enumerate(self.problems(split)):
            rng = random.Random(derive_seed(self.split_seed, "thought", split, number))
            reply = thoughtful(problem, coded=rng.random() < self.coded)
            out.append((Message("user", problem.question), Message("assistant", reply)))
        return out

    def vocabulary(self) -> Sequence[str]:
        """The words of the problems, the markers, and the words of the code; those only where it is ever used."""
        code = [f"q{n}" for n in range(CODE_WORDS)] if self.coded else []
        return sorted({*arithmetic.vocabulary([]), *MARKERS, *code})


def thoughtful(problem: arithmetic.ArithmeticProblem, coded: bool = False) -> str:
    """A reply that thinks in steps, plain or coded, and answers; with the blanks that a thought is handed on with."""
    return f"{MARKERS[0]}\n{thought(problem, coded)}\n{MARKERS[1]}\n\n#### {problem.answer}"


def thought(problem: arithmetic.ArithmeticProblem, coded: bool = False) -> str:
    """The steps to the answer, plain or coded."""
    steps = " . ".join(f"{left} {sign} {right} = {result}" for left, sign, right, result in problem.steps) + " ."
    return encode(steps) if coded else steps


def encode(steps: str) -> str:
    """The steps word by word in the code: a fixed permutation of numbers and signs."""
    return " ".join(_code().get(word, word) for word in steps.split())


@cache
def _code() -> dict[str, str]:
    plain = [*(str(number) for number in range(2 * arithmetic.LARGEST + 2)), *SIGNS]
    secret = [f"q{n}" for n in range(CODE_WORDS)]
    random.Random("upshot").shuffle(secret)
    return dict(zip(plain, secret, strict=False))


def _row(split: str, number: int, problem: arithmetic.ArithmeticProblem) -> Row:
    meta = {"difficulty": problem.difficulty}
    question = (Message("user", problem.question),)
    return Row(f"ciphers/{split}/{number}", question, None, str(problem.answer), "gsm8k", meta)
