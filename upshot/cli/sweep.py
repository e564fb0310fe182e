"""Train a recipe with every combination of some values and several seeds.

Train the recipe once for every combination of the lists given (key=[a,b]; to pass a list as a value, write [[…],[…]])
and every seed, one run after another, each in its own folder. The same command continues where it stopped. The table
shows the mean over seeds with its 95 % interval (Student's t).
"""

from __future__ import annotations

import argparse

from upshot.cli.options import add_options, count, run_of

run = run_of("offline.sweep")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    varied = {"metavar": "key=[a,b]", "help": "lists of values to vary, and plain key=value for all runs"}
    add_options(parser, "recipe", "overrides", overrides=varied)
    add = parser.add_argument
    seeds = "runs per combination, with seeds counted up from the recipe's (default 1)"
    add("--seeds", type=count, default=1, metavar="N", help=seeds)
    add("--out", metavar="DIR", help="folder of the runs (default: runs/sweep-RECIPE)")
    add("--metric", action="append", default=[], metavar="NAME", help="a metric to show as a column (repeatable)")
    add("--dry-run", action="store_true", help="list the runs and check the first one; train nothing")
    add_options(parser, "quiet", "json", quiet={"help": "print only the table"})
