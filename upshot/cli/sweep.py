"""`upshot sweep RECIPE key=[…] --seeds 3`: every combination, several seeds each, one table."""

from __future__ import annotations

import argparse

from upshot.cli.options import count, run_of


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "sweep",
        help="train a recipe with every combination of some values and several seeds; a table of mean ± interval",
        description="Train a recipe once for every combination of the lists given (key=[a,b]; a list as a value is "
        "[[…],[…]]) and every seed, one after another, each in a folder of its own. The same command goes on where it "
        "stopped. The table has the mean over seeds with its 95 %% interval (Student's t).",
    )
    add = parser.add_argument
    add("recipe", help="recipe name or file")
    add("overrides", nargs="*", default=[], metavar="key=[a,b]", help="what to vary, and plain key=value for all")
    add("--seeds", type=count, default=1, metavar="N", help="runs of each combination, from the recipe's seed on (1)")
    add("--out", metavar="DIR", help="folder of the runs (default: runs/sweep-RECIPE)")
    add("--metric", action="append", default=[], metavar="NAME", help="a column: a metric of the runs (repeatable)")
    add("--dry-run", action="store_true", help="list the runs, check the first of them, train nothing")
    add("--quiet", action="store_true", help="print only the table")
    add("--json", action="store_true", help="print the table as JSON")
    parser.set_defaults(run=run_of("offline.sweep"))
