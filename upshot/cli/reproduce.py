"""Run every stage of a published table and print our numbers beside the published ones.

Run the stages that a file in recipes/papers/ lists (data, trainings, evaluation) one after another, print the paper's
table with our numbers beside the published ones, and list what differs. Finished stages are not repeated; the same
command continues where it stopped.
"""

from __future__ import annotations

import argparse

from upshot.cli.options import add_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("paper", metavar="PAPER/TABLE", help="for example collabllm/table-1, classmates/gsm8k or gsm8k-multiturn")
    changes = "a variable of the table (model=…, judge=…), or STAGE.key=value, such as sft.train.lr=1e-4"
    add_options(parser, "overrides", overrides={"metavar": "NAME=VALUE", "help": changes})
    add("--task", metavar="NAME", help="for tables with several tasks (default: the first)")
    add("--out", metavar="DIR", help="folder of all stages (default: runs/PAPER-TABLE-TASK)")
    add("--small", action="store_true", help="run the whole chain in minutes: a tiny model, a scripted user and judge")
    add("--dry-run", action="store_true", help="plan all stages (calls, tokens, dollars, GPU hours) and run nothing")
    add("--verl", action="append", default=[], metavar="STAGE", help="train this stage on verl (repeatable)")


def run(args: argparse.Namespace) -> int:
    """Run the stages by this command line."""
    from upshot.cli import main
    from upshot.offline import reproduce

    return reproduce.run(args, main)
