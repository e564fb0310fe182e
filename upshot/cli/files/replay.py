"""`upshot replay RUN STEP`: score the replies of a finished step again, and show old and new side by side."""

from __future__ import annotations

import argparse

from upshot.cli.options import run_of


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "replay",
        help="score a step's replies again, from the run's files",
        description="Score the replies of a finished step again with the recipe's reward, from rollouts.jsonl: nothing "
        "is sampled of the policy. For a metric, verifier or judge that was changed: key=value overrides the recipe.",
    )
    parser.add_argument("folder", metavar="RUN", help="a run folder")
    parser.add_argument("step", metavar="STEP", type=int, help="a step of it, counted from 1")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="such as models.judge=URL#name reward.metrics=…"
    )
    parser.add_argument("--changed", action="store_true", help="show only what is not as it was")
    parser.add_argument("--json", action="store_true", help="a line of JSON per number")
    parser.set_defaults(run=run_of("offline.replay"))
