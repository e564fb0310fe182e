"""Grade-school math in one or several turns: the environment says what is wrong, and the policy may try again.

The environment reports, in this order: a missing answer line (`####`, or the form that the row's prompt asks for), an
answer line without a number, a wrong arithmetic step and, with `tell`, a wrong answer. `file: arithmetic` uses the
project's own small word problems instead of GSM8K.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from upshot.config.bounds import NonNegative, Share
from upshot.core.conversation import Conversation, Message, Row, derive_seed
from upshot.tasks import arithmetic
from upshot.tasks.base import list_replies, tasks
from upshot.tasks.datasets.records import row_of
from upshot.tasks.participants.base import Participant
from upshot.tasks.participants.feedback import Fault, Feedback
from upshot.tasks.verified import VerifiedTask
from upshot.tasks.verifiers.arithmetic import broken_steps
from upshot.tasks.verifiers.gsm8k import MARK, REPLIES, answer_line, asked_form, strict_answer
from upshot.tasks.verifiers.gsm8k import Gsm8kVerifier as Verdict
from upshot.tasks.verifiers.numbers import show_number

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
NO_LINE: dict[str, str] = _TABLE["no_line"]
NO_NUMBER: dict[str, str] = _TABLE["no_number"]
"""The feedback on a fault, by the form that the row's prompt asks for."""
BROKEN = "This step does not hold: {step} . Check it and answer again."
HINT = "This step does not hold: {step} . The left side is {value} . Answer again."
WRONG = "The answer is not right. Try again."


@tasks.register("gsm8k", "openai/gsm8k")
class Gsm8k(VerifiedTask):
    """Word problems whose answer is a number."""

    verifier = "gsm8k"
    hub = "openai/gsm8k@main"
    instructions = 'Think step by step and end your reply with the final answer on a line of its own: "#### <number>".'

    def __init__(
        self,
        mode: Literal["strict", "flexible"] = "strict",
        feedback: Sequence[Literal["format", "arithmetic"]] = ("format", "arithmetic"),
        tell: bool = False,
        hint: bool = False,
        flawed: Share = 0.7,
        heedless: Share = 0.6,
        fault_cost: NonNegative = 0.0,
        **rows: Any,
    ) -> None:
        """Make the task.

        mode: strict takes the number after `####`; flexible takes the last number if there is no such line.
        feedback: which faults the environment reports. tell: it also says when the answer is wrong.
        hint: for a wrong step, the feedback includes the value of its left side.
        fault_cost: what a fault subtracts from the score of its turn, with credit by turns.
        flawed, heedless: shares of faulty demonstrations and of ignored feedback (`file: arithmetic` only).
        """
        super().__init__(**rows)
        self.verifier_options = {"mode": mode}
        self.feedback = tuple(feedback)
        self.tell, self.hint, self.flawed, self.heedless = tell, hint, flawed, heedless
        self.fault_cost = fault_cost
        self._verdict = Verdict(mode)

    @property
    def made(self) -> bool:
        """Whether the rows are the project's own problems."""
        return self._file == "arithmetic"

    def answer_text(self, row: Row) -> str:
        """The answer line."""
        number = strict_answer(str(row.reference))
        return REPLIES[form_of(row)].format(row.reference if number is None else show_number(number))

    def environment(self) -> Participant:
        """Feedback on form, arithmetic and, with `tell`, the answer."""
        return Feedback(self.review, cost=self.fault_cost)

    def review(self, conversation: Conversation) -> Fault | None:
        """What is wrong with the last reply."""
        reply = self.response(conversation) or ""
        form = form_of(conversation.row)
        fault = self.fault(reply, form)
        if fault is not None or not self.tell:
            return fault
        verdict = self._verdict.score(reply, conversation.row.reference, {"prompt": form})
        return Fault("wrong", WRONG) if verdict.value == 0 else None

    def fault(self, reply: str, form: str = MARK) -> Fault | None:
        """What is wrong with a reply to a prompt that asks for this form, whatever the right answer is."""
        if "format" in self.feedback and strict_answer(reply, form) is None:
            return Fault("format", (NO_LINE if answer_line(reply, form) is None else NO_NUMBER)[form])
        if "arithmetic" not in self.feedback or not (broken := broken_steps(reply)):
            return None
        step = " ".join(broken[0].text.replace("=", " = ").split())
        text = HINT if self.hint else BROKEN
        return Fault("arithmetic", text.format(step=step, value=show_number(broken[0].value)))

    def format_error(self, text: str, form: str = MARK) -> str:
        """No line in the form that was asked for, or no number on it."""
        if answer_line(text, form) is None:
            return f"no {form} line"
        return "" if strict_answer(text, form) is not None else "not a number"

    def format_faults(self, conversation: Conversation) -> list[str]:
        """`format_error` of each turn, by the form that the row's prompt asks for."""
        return [self.format_error(reply, form_of(conversation.row)) for reply in list_replies(conversation)]

    def parse(self, record: Mapping[str, Any]) -> Row:
        """A record as a row, with the number of steps of its solution as its difficulty."""
        row = super().parse(record)
        steps = str(row.reference).count("<<")
        if "difficulty" in row.meta or not steps:
            return row
        level = "1-2 steps" if steps <= 2 else "3-4 steps" if steps <= 4 else "5+ steps"
        return replace(row, meta={**row.meta, "difficulty": level})

    @cached_property
    def _splits(self) -> dict[str, list[Row]]:
        if not self.made:
            return super()._splits
        sizes = {"train": 4000, "validation": 400, "test": 400}
        return {split: [_made_row(p) for p in self._problems(split, n)] for split, n in sizes.items()}

    def _problems(self, split: str, count: int) -> list[arithmetic.ArithmeticProblem]:
        return arithmetic.problems(split, min(count, self.limit or count), self.split_seed)

    def dialogues(self, split: str) -> Sequence[tuple[Message, ...]]:
        """The project's flawed demonstrations; of GSM8K, each question with its own solution."""
        if not self.made:
            worked = [row for row in self.rows(split) if "####" in str(row.reference)]
            return [(*row.messages, Message("assistant", str(row.reference))) for row in worked]
        out = []
        for number, problem in enumerate(self._problems(split, 4000)):
            rng = random.Random(derive_seed(self.split_seed, "demo", split, number))
            out.append(arithmetic.demonstration(problem, rng, self.fault, self.flawed, self.heedless))
        return out

    def vocabulary(self) -> Sequence[str]:
        """The words of the made problems; empty for GSM8K, which speaks English."""
        sentences = [text.format(step="", value="") for text in (NO_LINE[MARK], NO_NUMBER[MARK], BROKEN, HINT, WRONG)]
        return arithmetic.vocabulary(sentences) if self.made else []


def _made_row(problem: arithmetic.ArithmeticProblem) -> Row:
    record = {"prompt": [{"role": "user", "content": problem.question}], "answer": str(problem.answer)}
    return row_of({**record, "difficulty": problem.difficulty}, Gsm8k.verifier)


def form_of(row: Row) -> str:
    """The form in which a row's prompt wants the answer."""
    return asked_form([message.content for message in row.messages])
