"""`upshot reproduce PAPER/TABLE`: a published table from its first stage to our numbers beside the published ones."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "reproduce",
        help="run all stages of a published table, and print it with our numbers beside the published ones",
        description="Run the stages of a file below recipes/papers/ (data, trainings, evaluation) one after another, "
        "print the paper's table with our numbers beside the published ones, and list what differs. Finished stages "
        "are not repeated; the same command continues where it stopped.",
    )
    add = parser.add_argument
    add("paper", metavar="PAPER/TABLE", help="such as collabllm/table-1, classmates/gsm8k, gsm8k-multiturn")
    changes = "a variable of the table (model=…, judge=…), or STAGE.key=value, such as sft.train.lr=1e-4"
    add("overrides", nargs="*", default=[], metavar="NAME=VALUE", help=changes)
    add("--task", metavar="NAME", help="of a table with several tasks (default: its first)")
    add("--out", metavar="DIR", help="folder of all stages (default: runs/PAPER-TABLE-TASK)")
    add("--small", action="store_true", help="the whole chain in minutes: a tiny model, a scripted user and judge")
    add("--dry-run", action="store_true", help="plan all stages: calls, tokens, dollars, GPU hours; run nothing")
    add("--verl", action="append", default=[], metavar="STAGE", help="train this stage on verl (repeatable)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the stages by this command line."""
    from upshot.cli import main
    from upshot.offline import reproduce

    return reproduce.run(args, main)
