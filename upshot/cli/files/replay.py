"""Score the replies of a finished step again, from the run's files.

Score the replies of a finished step again with the recipe's reward, from rollouts.jsonl; the policy samples nothing.
Use it after changing a metric, verifier or judge: key=value overrides the recipe.
"""

from __future__ import annotations

import argparse

from upshot.cli.options import add_options, run_of

run = run_of("offline.replay")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("folder", metavar="RUN", help="a run folder")
    parser.add_argument("step", metavar="STEP", type=int, help="a step of the run, counted from 1")
    example = {"help": "recipe keys, such as models.judge=URL#name reward.metrics=…"}
    parser.add_argument("--changed", action="store_true", help="show only numbers that changed")
    add_options(parser, "overrides", "json", overrides=example, json={"help": "print one line of JSON per number"})
