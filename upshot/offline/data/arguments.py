"""Arguments that building and evaluating share."""

from __future__ import annotations

import argparse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def add_call_seconds(parser: argparse.ArgumentParser) -> None:
    """The time limit of the user's own code (time_limit.py)."""
    parser.add_argument(
        "--call-seconds",
        type=_seconds,
        default=120.0,
        metavar="S",
        help="most seconds of one call of a metric, verifier or user of your own (default 120), which is missing then",
    )
