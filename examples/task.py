"""`task_loop.py` as a task that a recipe names, and its fee as a metric: a plain function.

upshot train examples/task.yaml        # or: python examples/task.py
"""

import random
from collections.abc import Sequence
from pathlib import Path

from task_loop import WORDS, Reminder, demonstration, is_correct, make_row

import upshot
from upshot import Conversation, Message, Participant, Row, Score, Task


def reminders(conversation: Conversation) -> float:
    """How often the environment had to step in; the recipe gives it a negative weight."""
    return float(conversation.counts.get("reminders", 0.0))


class Sums(Task):
    """Rows, environment, verdict, and what the warm start imitates."""

    name = "sums"

    def __init__(self, size: int = 500) -> None:
        self.size = size

    def rows(self, split: str) -> Sequence[Row]:
        """`size` questions per split, in a stable order."""
        rng = random.Random(f"rows {split}")
        return [make_row(rng, number) for number in range(self.size)]

    def environment(self) -> Participant:
        """Who answers between the turns of an episode."""
        return Reminder()

    async def verify(self, conversation: Conversation) -> Score:
        """What the metric `verifier` reports for a finished episode."""
        return Score(is_correct(conversation))

    def dialogues(self, split: str) -> Sequence[tuple[Message, ...]]:
        """For the warm start."""
        rng = random.Random(f"dialogues {split}")
        return [tuple(demonstration(rng)) for _ in range(self.size)]

    def vocabulary(self) -> Sequence[str]:
        """For a new tiny model."""
        return sorted(set(WORDS))


if __name__ == "__main__":
    run = upshot.train(Path(__file__).with_suffix(".yaml"))
    print(run.path, run.steps[-1]["reward/mean"])
