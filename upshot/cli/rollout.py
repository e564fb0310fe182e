"""Play a few prompts of a recipe and print the trees with their rewards; nothing is trained.

Play a few prompts as a training step would (replies, futures, rewards) and print the trees. RECIPE is a name, a file or
a run folder, whose best checkpoint then speaks; key=value overrides it.
"""

from __future__ import annotations

import argparse

from upshot.cli.options import add_options, count, run_of

run = run_of("offline.play.rollout")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_options(parser, "recipe", "overrides")
    add = parser.add_argument
    add("--n", type=count, default=3, metavar="N", help="number of prompts (default 3)")
    add("--replies", type=count, default=2, metavar="N", help="replies to each prompt (default 2)")
    add("--model", metavar="MODEL", help="the model that speaks: a folder, run, URL#name … (default: the recipe's)")
    add("--split", default="train", help="split of the task's rows (default train)")
    add("--seed", type=int, default=0, help="seed of the replies (default 0)")
    add_options(parser, "json", json={"help": "print one line of JSON per reply, as in rollouts.jsonl"})
