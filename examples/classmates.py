"""`classmates_loop.py` as a task that a recipe names, and its classmate as a model that another recipe trains.

upshot train examples/classmate.yaml                          # the classmate, once: runs/example-classmate
upshot train examples/classmates.yaml                         # or both with: python examples/classmates.py
upshot train examples/classmates.yaml futures=none            # the baseline: nobody reads the thoughts
"""

import random
from collections.abc import Sequence
from pathlib import Path

from classmates_loop import PLAIN, WORDS, demonstration, is_correct, make_row

import upshot
from upshot import Conversation, Message, Row, Score, Task


class Thoughts(Task):
    """Questions whose answers follow a thought, coded or plain."""

    name = "thoughts"

    def __init__(self, coded: float = 0.6, size: int = 500) -> None:
        self.coded = coded
        """Share of the demonstrations that think in the code; 0 for a classmate, which does not know the code."""
        self.size = size

    def rows(self, split: str) -> Sequence[Row]:
        """`size` questions per split, in a stable order."""
        rng = random.Random(f"rows {split}")
        return [make_row(rng, number) for number in range(self.size)]

    async def verify(self, conversation: Conversation) -> Score:
        """Whether the last answer is right; it may be the policy's or a classmate's."""
        return Score(is_correct(conversation))

    def dialogues(self, split: str) -> Sequence[tuple[Message, ...]]:
        """For the warm start."""
        rng = random.Random(f"dialogues {split}")
        return [tuple(demonstration(rng, self.coded)) for _ in range(self.size)]

    def vocabulary(self) -> Sequence[str]:
        """For a new tiny model."""
        return sorted(set(WORDS if self.coded else (*PLAIN, "<think>", "</think>")))


if __name__ == "__main__":
    here = Path(__file__).parent
    peer = upshot.train(here / "classmate.yaml").checkpoint
    run = upshot.train(here / "classmates.yaml", models={"peer": f"./{peer}"})
    print(run.path, run.steps[-1]["reward/mean"], run.steps[-1]["part/classmate"])
