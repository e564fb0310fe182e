"""What verl's trainer process itself does in a step: advantages and importance of all rows, on one core.

    python benchmarks/cluster_driver.py --rows 512 1024 2048 4096 --tokens 2048

The peer is the same work at the first size: if the driver is linear, the seconds per token do not grow. The batch is
artificial, and `train.importance` is on. Neither verl nor Ray is needed.
"""

from __future__ import annotations

import argparse
import random
import time

from upshot.config.load import load_recipe
from upshot.core.conversation import Conversation, Message, Row, Sample, Turn
from upshot.core.score import Score
from upshot.rewards.credit import MAIN, Credit, Reward, Span
from upshot.rollout.reply import Rollout
from upshot.verl.train_batch import BatchRow, teach

GROUP, PROMPT = 8, 256
TEXTS = 64
"""Different replies; all others are copies that share their memory, so that a large step fits on a small machine."""


def make_step(rows: int, tokens: int) -> tuple[list[list[Rollout]], list[BatchRow]]:
    """Replies of this many ids in groups of eight, and what verl would have computed for them."""
    rng, groups, batch = random.Random(0), [], []
    said = [tuple(rng.randrange(32_000) for _ in range(tokens)) for _ in range(TEXTS)]
    sampled = [tuple(-rng.random() for _ in range(tokens)) for _ in range(TEXTS)]
    found = [[value + 1e-3 for value in logprobs] for logprobs in sampled]
    for number in range(rows):
        ids, logprobs = said[number % TEXTS], sampled[number % TEXTS]
        prompt = (number, *range(1, PROMPT))  # distinguishes the rows
        talk = Conversation(Row(str(number // GROUP), (Message("user", "x"),)), 0, str(number))
        talk.turns = (*talk.turns, Turn(Message("assistant", "y"), Sample(prompt, ids, logprobs, "stop")))
        score = Score(rng.random())
        credit = Credit({MAIN: score}, (Span(PROMPT, PROMPT + tokens, (MAIN,)),))
        reply = Rollout(talk, number // GROUP, reward=Reward(score), credit=credit)
        if number % GROUP == 0:
            groups.append([])
        groups[-1].append(reply)
        batch.append(BatchRow(reply, PROMPT + tokens, found[number % TEXTS]))
    return groups, batch


def main() -> None:
    """Print a line a size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    config = load_recipe("quickstart", ["train.importance=truncate"]).recipe.train
    first = 0.0
    for rows in args.rows:
        groups, batch = make_step(rows, args.tokens)
        began = time.process_time()
        teach(config, groups, batch)
        took = time.process_time() - began
        each = took / (rows * args.tokens) * 1e6
        first = first or each
        print(f"{rows:5d} x {args.tokens}: {took:6.2f} s, {each:.2f} µs a token, {each / first:.2f} x the first size")


if __name__ == "__main__":
    main()
