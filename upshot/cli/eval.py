"""`upshot eval`: models side by side on held-out goals, or the judge against labelled rows."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb: a table of models, or `eval judge FILE`."""
    from upshot.evaluate import judge, table

    parser = subparsers.add_parser(
        "eval",
        help="compare models on held-out goals; `eval judge` scores the judge itself",
        description="Play whole conversations on held-out goals and print the table.",
        epilog="`upshot eval judge FILE` reports how well a judge agrees with labelled rows.",
    )
    table.add_arguments(parser)
    parser.set_defaults(run=table.run)
    second = subparsers.add_parser("eval-judge", help=argparse.SUPPRESS, prog="upshot eval judge")
    judge.add_judge_arguments(second)
    second.set_defaults(run=judge.run_judge)
