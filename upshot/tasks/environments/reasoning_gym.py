"""Problems of the library reasoning-gym: over a hundred generators, whose own scorers are the verifiers.

A problem is made from its generator, the generator's settings, a seed and an index, so a row carries only those and any
process can make the same problem and score a reply to it. The answer is read between `<answer>` and `</answer>`, the
library's own convention. As in GSM8K, the policy may try again in several turns.

Not supported: the library's curricula and composite sets, which change during training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from upshot.config.bounds import Made, NonNegative, Whole, Words
from upshot.core.conversation import Conversation, Message, Row, derive_seed
from upshot.core.errors import UserError, did_you_mean, import_optional
from upshot.core.score import Score
from upshot.core.time_limit import limit_call_now
from upshot.tasks.base import Task, tasks
from upshot.tasks.participants.base import Participant
from upshot.tasks.participants.feedback import Fault, Feedback
from upshot.tasks.verifiers.base import Claim, Extra, Verifier, verifiers, verify_claim

NAME = "reasoning-gym"
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
INSTRUCTIONS = "Think step by step and end your reply with the final answer between <answer> and </answer>."
NO_ANSWER = "Your reply has no answer. End it with: <answer>your answer</answer>"
WRONG = "The answer is not right. Try again."


def read_answer(reply: str) -> str | None:
    """The text between the last pair of answer tags; None if there is no pair."""
    answers = ANSWER.findall(reply)
    return answers[-1].strip() if answers else None


@lru_cache(maxsize=64)
def _make_dataset(name: str, arguments: str, seed: int, size: int) -> Any:
    gym = import_optional("reasoning_gym.factory", f"task '{NAME}' needs the library: pip install -e '.[{NAME}]'")
    if name not in gym.DATASETS:
        raise UserError(f"task.dataset '{name}' is not in reasoning-gym; {did_you_mean(name, gym.DATASETS)}")
    try:
        return gym.create_dataset(name, **json.loads(arguments), seed=seed, size=size)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"task.arguments {arguments} do not fit reasoning-gym's '{name}': {error}") from error


@verifiers.register(NAME)
class ReasoningGymVerifier(Verifier):
    """The score of the generator's own scorer, 0 to 1; 0 for a reply without an answer."""

    graded = True
    risky = True  # some scorers parse the answer with sympy, which hostile text can keep busy
    needs = ("extra.seed", "extra.index")

    def __init__(self, dataset: Words, arguments: Mapping[str, Any] | None = None, size: Made = 1000) -> None:
        self.dataset, self.size = dataset, size
        self.arguments = json.dumps(arguments or {}, sort_keys=True)

    def problems(self, seed: int) -> Any:
        """The generator with this seed; indexing it makes a problem."""
        return _make_dataset(self.dataset, self.arguments, seed, self.size)

    def quick(self, response: str, reference: Any, extra: Extra) -> Score | None:
        """A reply without an answer needs no scorer."""
        return Score(0.0, detail={"fault": "no answer"}) if read_answer(response) is None else None

    def score(self, response: str, reference: Any, extra: Extra) -> Score:
        """The scorer's verdict on the problem, made again from its seed and index."""
        if (quick := self.quick(response, reference, extra)) is not None:
            return quick
        problems, answer = self.problems(extra["seed"]), read_answer(response)
        value = limit_call_now(problems, problems.score_answer, answer, problems[extra["index"]])
        return Score(float(value), detail={"answer": (answer or "")[:500]})


@tasks.register(NAME, "reasoning_gym")
class ReasoningGymTask(Task):
    """Problems of one generator; splits are made from different seeds and share no question."""

    def __init__(
        self,
        dataset: Words,
        arguments: Mapping[str, Any] | None = None,
        rows_per_split: Made = 1000,
        seed: Whole = 0,
        instructions: str = INSTRUCTIONS,
        system: str = "",
        tell: bool = False,
        fault_cost: NonNegative = 0.0,
    ) -> None:
        """Make the task.

        dataset: the generator's name. arguments: its own settings, such as {max_terms: 3}.
        rows_per_split: problems made for each split; repeated questions are dropped. seed: which problems.
        instructions: put after each question. system: a system prompt.
        tell: the environment also says when the answer is wrong. fault_cost: what a fault costs its turn, with credit
        by turns.
        """
        self.seed, self.instructions, self.system = seed, instructions, system
        self.tell, self.fault_cost = tell, fault_cost
        self._options: dict[str, Any] = {"dataset": dataset, "arguments": dict(arguments or {}), "size": rows_per_split}
        self._verifier = ReasoningGymVerifier(**self._options)

    def rows(self, split: str) -> Sequence[Row]:
        """The problems of a split."""
        rows = self._splits.get(split, [])
        if not rows:
            sizes = ", ".join(f"{name} {len(made)}" for name, made in self._splits.items())
            raise UserError(f"'{self._verifier.dataset}' makes too few different questions ({sizes} for the splits)")
        return rows

    @cached_property
    def _splits(self) -> dict[str, list[Row]]:
        seen: set[str] = set()
        return {split: self._make_rows(split, seen) for split in ("test", "validation", "train")}

    def _make_rows(self, split: str, seen: set[str]) -> list[Row]:
        seed = derive_seed(self.seed, NAME, split) % (1 << 31)
        problems, rows = self._verifier.problems(seed), []
        opening = (Message("system", self.system),) if self.system else ()
        for index in range(self._verifier.size):
            problem = problems[index]
            question = problem["question"]
            if question in seen:
                continue
            seen.add(question)
            prompt = f"{question}\n\n{self.instructions}" if self.instructions else question
            messages = (*opening, Message("user", prompt))
            where = {"seed": seed, "index": index}
            rows.append(Row(f"{split}-{index}", messages, reference=problem["answer"], source=NAME, meta=where))
        return rows

    def claim(self, conversation: Conversation) -> Claim | None:
        """The last reply, with the settings from which its problem can be made again."""
        last, row = conversation.last("assistant"), conversation.row
        return None if last is None else Claim(NAME, last.content, row.reference, dict(row.meta), self._options)

    async def verify(self, conversation: Conversation) -> Score:
        """The scorer's verdict, found in this process."""
        return await verify_claim(self.claim(conversation))

    def environment(self) -> Participant:
        """Feedback on the form and, with `tell`, on the answer."""
        return Feedback(self.review, cost=self.fault_cost)

    def review(self, conversation: Conversation) -> Fault | None:
        """What is wrong with the last reply."""
        claim = self.claim(conversation)
        if claim is None or read_answer(claim.response) is None:
            return Fault("format", NO_ANSWER)
        if not self.tell or self._verifier.score(claim.response, claim.reference, claim.extra).value == 1:
            return None
        return Fault("wrong", WRONG)

    def format_error(self, text: str) -> str:
        """Whether there is no pair of answer tags."""
        return "" if read_answer(text) is not None else "no answer"

    def answer_text(self, row: Row) -> str:
        """The answer in its tags."""
        return f"<answer>{row.reference}</answer>"

    def dialogues(self, split: str) -> Sequence[tuple[Message, ...]]:
        """Each question with its bare answer, if the generator has a single answer."""
        answered = [row for row in self.rows(split) if row.reference is not None]
        return [(*row.messages, Message("assistant", self.answer_text(row))) for row in answered]

    def groups(self, row: Row) -> Mapping[str, str]:
        """The generator's name."""
        return {"task": self._verifier.dataset}
