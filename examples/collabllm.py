"""`collabllm_loop.py` as a task that a recipe names: the same rows, customer and verdict, without the loop.

upshot train examples/collabllm.yaml        # or: python examples/collabllm.py
"""

import random
from collections.abc import Sequence
from pathlib import Path

from collabllm_loop import WORDS, customer, demonstration, is_correct, make_row

import upshot
from upshot import Conversation, Message, Observation, Participant, Row, Score, Task


class Customer(Participant):
    """Continues the conversation in the futures."""

    async def observe(self, conversation: Conversation) -> Observation:
        """The customer's next message, or its leaving."""
        said = customer(conversation)
        return Observation((said,)) if said is not None else Observation(done=True, reason="left")


class Shop(Task):
    """Rows, user, verdict, and what the warm start imitates."""

    name = "shop"

    def __init__(self, size: int = 500) -> None:
        self.size = size

    def rows(self, split: str) -> Sequence[Row]:
        """`size` openings per split, in a stable order."""
        rng = random.Random(f"rows {split}")
        return [make_row(rng, number) for number in range(self.size)]

    def user(self) -> Participant:
        """Who continues the replies."""
        return Customer()

    async def verify(self, conversation: Conversation) -> Score:
        """What the metric `verifier` reports for a finished future."""
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
