"""`upshot rollout RECIPE`: a few prompts played and scored before any training, as trees."""

from __future__ import annotations

import argparse

from upshot.cli.options import count, run_of


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "rollout",
        help="play a few prompts of a recipe and print the trees with their rewards; nothing is trained",
        description="Play a few prompts as a training step would (replies, futures, rewards) and print the trees. "
        "RECIPE is a name, a file or a run folder (its best checkpoint speaks); key=value overrides it.",
    )
    add = parser.add_argument
    add("recipe", help="recipe name, file or run folder")
    add("overrides", nargs="*", default=[], metavar="key=value", help="such as futures.samples=3")
    add("--n", type=count, default=3, metavar="N", help="prompts (default 3)")
    add("--replies", type=count, default=2, metavar="N", help="replies to each (default 2)")
    add("--model", metavar="MODEL", help="who speaks: a folder, run, URL#name … (default: the recipe's own model)")
    add("--split", default="train", help="of the task's rows (default train)")
    add("--seed", type=int, default=0, help="of the replies (default 0)")
    add("--step", action="store_true", help="stop before each call of a model, user, environment or metric")
    add("--json", action="store_true", help="a line of JSON per reply, as rollouts.jsonl has it")
    parser.set_defaults(run=run_of("offline.play.rollout"))
