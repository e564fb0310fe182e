"""Word problems in plain English, some with a number withheld: the user knows it, and says it when asked.

"Anna has some apples and buys 4 more. How many apples does Anna have now?" A model may guess, or ask and then answer.
Guessing is short and wrong; asking pays only to someone who looks at what comes next, and only if what it says next is
right. Everything is made by rule from a seed and the sentences of `withheld.yaml`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import yaml

from upshot.config.bounds import Made, Share, Whole
from upshot.core.conversation import Conversation, Message, Row, derive_seed, messages_from
from upshot.core.errors import UserError
from upshot.core.files import read_jsonl
from upshot.core.score import Score
from upshot.tasks.arithmetic import split_of_question
from upshot.tasks.base import Task, last_reply, list_replies, tasks
from upshot.tasks.participants.base import Observation, Participant, User
from upshot.tasks.users.plain import END_MARK, swap_roles

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Karen", "Leo", "Maya")
THINGS = ("apples", "books", "pencils", "marbles", "stamps", "cookies", "shells", "coins", "cards", "eggs")
ANSWER = re.compile(r"The answer is (-?\d+)")
NOTHING_LEFT = "I told you everything."


@dataclass(frozen=True)
class Kind:
    """A kind of problem about {n}'s {t} with the numbers {a} and {b}."""

    text: str
    ask: list[str]
    """The question for each number."""
    tell: list[str]
    """The user's answer to it."""
    words: list[str]
    """What a question in other words must say to be about it, as a regular expression."""
    sum: str
    """How it is worked out."""
    unknown: list[str]
    """What stands in the place of a number that is withheld."""


KINDS = [Kind(**kind) for kind in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))]


@dataclass(frozen=True)
class Problem:
    """A problem with its two numbers."""

    kind: int
    name: str
    thing: str
    numbers: tuple[int, int]

    def say(self, template: str, hidden: Sequence[int] = ()) -> str:
        """A text about it; hidden numbers are only hinted at."""
        shown = [KINDS[self.kind].unknown[at] if at in hidden else str(self.numbers[at]) for at in (0, 1)]
        return template.format(n=self.name, t=self.thing, a=shown[0], b=shown[1])

    def text(self, hidden: Sequence[int] = ()) -> str:
        """The problem, without some of its numbers."""
        return self.say(KINDS[self.kind].text, hidden)

    @property
    def total(self) -> int:
        """The answer."""
        a, b = self.numbers
        return (a + b, a - b, a * b, a + a + b)[self.kind]

    def solution(self) -> str:
        """A worked answer."""
        return f"{self.say(KINDS[self.kind].sum)} = {self.total}. The answer is {self.total}."

    def guess(self, hidden: Sequence[int], rng: random.Random) -> Problem:
        """The same with other numbers in the place of hidden ones."""
        first, second = (_number(self.kind, at, rng) if at in hidden else self.numbers[at] for at in (0, 1))
        return replace(self, numbers=(first, second))


def make_problem(rng: random.Random) -> Problem:
    """A random problem."""
    kind = rng.randrange(len(KINDS))
    return Problem(kind, rng.choice(NAMES), rng.choice(THINGS), (_number(kind, 0, rng), _number(kind, 1, rng)))


def _number(kind: int, at: int, rng: random.Random) -> int:
    if at == 1 or kind == 2:
        return rng.randrange(2, 9)
    return rng.randrange(14, 49) if kind == 1 else rng.randrange(5, 40)


class Knower(User):
    """Knows the whole problem; says a withheld number when asked, and leaves when no question is asked."""

    async def observe(self, conversation: Conversation) -> Observation:
        """The number that was asked for, or the next one; done when the assistant has answered or asked nothing."""
        question = last_reply(conversation)
        if ANSWER.search(question) or "?" not in question:
            return Observation(done=True, reason="answered" if ANSWER.search(question) else "left")
        kind, name, thing, a, b = conversation.row.meta["problem"]
        problem, hidden = Problem(kind, name, thing, (a, b)), list(conversation.row.meta["hidden"])
        heard = [message.content for message in conversation.messages if message.role == "user"]
        return Observation((Message("user", answer_question(problem, hidden, question, heard)),))


def answer_question(problem: Problem, hidden: Sequence[int], question: str, heard: Sequence[str]) -> str:
    """What the user says to a question, having said some things already."""
    kind = KINDS[problem.kind]
    facts = {at: problem.say(kind.tell[at]) for at in hidden}
    left = [at for at in hidden if not any(facts[at] in text for text in heard)]
    meant = [at for at in left if re.search(kind.words[at], question, re.IGNORECASE)] or left[:1]
    return " ".join(facts[at] for at in meant) or NOTHING_LEFT


def asks(conversation: Conversation) -> float:
    """A metric: whether the first thing that the assistant says is a question."""
    first = next(iter(list_replies(conversation)), "")
    return float("?" in first and not ANSWER.search(first))


@tasks.register("withheld")
class WithheldTask(Task):
    """Openings with and without all their numbers, the user who knows them, and demonstrations that mostly guess."""

    def __init__(
        self,
        rows_per_split: Made = 2000,
        ambiguous: Share = 0.6,
        most_withheld: Literal[1, 2] = 1,
        asking: Share = 0.15,
        side: Literal["assistant", "user"] = "assistant",
        prompts: str | None = None,
        seed: Whole = 0,
    ) -> None:
        """Make the task.

        ambiguous: share of openings in which something is withheld. most_withheld: one number, or one or both.
        asking: share of the ambiguous demonstrations that ask; the others guess.
        side: who is imitated in the demonstrations; the user's side trains a simulated user ('plain').
        prompts: the rollouts.jsonl of a run of this task; its conversations, cut before every assistant turn, become
        the training rows.
        """
        self.size, self.seed, self.prompts = rows_per_split, seed, prompts
        self.ambiguous, self.most_withheld = ambiguous, most_withheld
        self.asking, self.side = asking, side

    def rows(self, split: str) -> Sequence[Row]:
        """Openings; no problem is in two splits."""
        self.check_split(split)
        return self._midway if split == "train" and self.prompts else self._openings(split)

    def _openings(self, split: str) -> list[Row]:
        return [self._row(f"withheld/{split}/{number}", split, number) for number in range(self.size)]

    @cached_property
    def _midway(self) -> list[Row]:
        """The conversations of a run cut before every turn of the assistant, the first included."""
        known = {row.id: row for row in self._openings("train")}
        path = Path(self.prompts or "")
        if not path.is_file():
            raise UserError(f"task.prompts: there is no file '{path}'; name the rollouts.jsonl of a run of this task")
        rows: dict[str, Row] = {}
        for number, line in enumerate(read_jsonl(path), 1):
            if not {"row", "messages", "futures"} <= line.keys() or line["row"] not in known:
                where = f"line {number}: " + (f"row '{line['row']}'" if "row" in line else "no row")
                raise UserError(f"task.prompts='{path}', {where}; it is not a reply of this task's training")
            row, episode = known[line["row"]], line["messages"]
            for future in line["futures"] or [{"messages": []}]:
                whole = messages_from([*episode, *future["messages"]])
                for end, message in enumerate(whole):
                    if message.role == "assistant":
                        text = "\n".join(one.content for one in whole[:end])
                        rows[f"{row.id} {text}"] = replace(row, id=f"{row.id}@{len(rows)}", messages=whole[:end])
        return list(rows.values())

    def user(self) -> Participant:
        """The one who knows."""
        return Knower()

    async def verify(self, conversation: Conversation) -> Score:
        """1 if the last thing the assistant said is the right number, else 0."""
        answers = ANSWER.findall(last_reply(conversation))
        return Score(float(answers[-1:] == [conversation.row.reference]))

    def answer_text(self, row: Row) -> str:
        """The sentence that an answer ends with."""
        return f"The answer is {row.reference}."

    def groups(self, row: Row) -> Mapping[str, str]:
        """Ambiguous or unambiguous opening."""
        return {"opening": "ambiguous" if row.meta["hidden"] else "unambiguous"}

    def dialogues(self, split: str) -> list[tuple[Message, ...]]:
        """Demonstrations of one side of the conversation."""
        return [self._dialogue(split, number) for number in range(self.size)]

    def _draw(self, name: str, split: str, number: int) -> tuple[Problem, list[int], random.Random]:
        rng = random.Random(derive_seed(self.seed, name, split, number))
        problem = make_problem(rng)
        while split_of_question(problem.text()) != split:
            problem = make_problem(rng)
        hidden: list[int] = []
        if rng.random() < self.ambiguous:
            hidden = [0, 1] if self.most_withheld == 2 and rng.random() < 0.5 else [rng.randrange(2)]
        return problem, hidden, rng

    def _row(self, name: str, split: str, number: int) -> Row:
        problem, hidden, _ = self._draw("rows", split, number)
        meta = {"problem": [problem.kind, problem.name, problem.thing, *problem.numbers], "hidden": hidden}
        opening = (Message("user", problem.text(hidden)),)
        return Row(name, opening, problem.text(), str(problem.total), self.name, meta)

    def _dialogue(self, split: str, number: int) -> tuple[Message, ...]:
        problem, hidden, rng = self._draw("dialogues", split, number)
        talk = [Message("user", problem.text(hidden))]
        if self.side == "user":  # it answers questions, also needless ones, and leaves when it has got an answer
            for at in hidden if rng.random() < 0.7 else ():
                talk += _ask(problem, at)
            if rng.random() < 0.3:
                asked = problem.say(KINDS[problem.kind].ask[rng.randrange(2)])
                heard = [message.content for message in talk if message.role == "user"]
                talk += [Message("assistant", asked), Message("user", answer_question(problem, hidden, asked, heard))]
            ending = [Message("assistant", problem.guess(hidden, rng).solution()), Message("user", END_MARK)]
            return tuple(swap_roles(problem.text(), [*talk, *ending]))
        if hidden and rng.random() >= self.asking:
            return (*talk, Message("assistant", problem.guess(hidden, rng).solution()))
        for at in hidden:
            talk += _ask(problem, at)
        return (*talk, Message("assistant", problem.solution()))


def _ask(problem: Problem, at: int) -> list[Message]:
    kind = KINDS[problem.kind]
    return [Message("assistant", problem.say(kind.ask[at])), Message("user", problem.say(kind.tell[at]))]
