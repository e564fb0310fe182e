"""`upshot eval`: models side by side on held-out goals, or the judge against labelled rows."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    from upshot.evaluate import table

    parser = subparsers.add_parser(
        "eval",
        help="compare models on held-out goals; `eval judge` scores the judge itself",
        description="Play whole conversations on held-out goals and print the table.",
        epilog="`upshot eval judge FILE` reports how well a judge agrees with labelled rows.",
    )
    table.add_arguments(parser)
    parser.set_defaults(run=table.run)


def judge_parser() -> argparse.ArgumentParser:
    """The parser of `upshot eval judge`."""
    from upshot.evaluate import judge

    parser = argparse.ArgumentParser(
        prog="upshot eval judge", description="How well a judge agrees with labelled conversations."
    )
    judge.add_judge_arguments(parser)
    parser.set_defaults(run=judge.run_judge)
    return parser
