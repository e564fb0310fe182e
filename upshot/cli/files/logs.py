"""Look at a product's conversations, or prepare users, rows and a recipe from them."""

from __future__ import annotations

import argparse

from upshot.cli.options import JOB, add_options, add_parts, count, run_of

FIELDS = {"outcome": "the outcome", "customer": "the customer", "time": "the time", "kind": "the topic"}
"""Of a conversation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verbs below it."""
    add_parts(parser, look=add_look, prepare=add_prepare)


def add_look(parser: argparse.ArgumentParser) -> None:
    """Show what is in the logs: sizes, languages, signs and outcomes. Needs no model.

    Print a table and write a page: what was read, what was left out and why, how often the assistant asks, repeats
    itself, is corrected or abandoned, and the outcome with and without each of these.
    """
    _add_reading(parser)
    parser.add_argument("--out", metavar="FILE", help="the page (default logs.html)")
    add_options(parser, "quiet", "json")
    parser.set_defaults(run=run_of("offline.logs.look"))


def add_prepare(parser: argparse.ArgumentParser) -> None:
    """Make rows, a simulated user and a recipe from logs, and measure how well the user predicts real outcomes.

    The folder --out holds all of it. The same command continues where it stopped.
    """
    _add_reading(parser)
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="folder for all results")
    add("--model", metavar="MODEL", help="extracts goals, and plays the user without --fit-user: URL#name, folder …")
    add("--fit-user", action="store_true", help="fine-tune a model on what users said, how it ended, and the assistant")
    add("--base", default="smollm2-135m", metavar="MODEL", help="the model that --fit-user starts from, or 'tiny'")
    add("--steps", type=count, default=300, metavar="N", help="training steps of --fit-user (default 300)")
    most = "make rows of at most N conversations, taken evenly from all"
    add("--conversations", type=count, default=20_000, metavar="N", help=most)
    add("--context", type=count, default=2048, metavar="N", help="tokens that --fit-user's model sees (default 2048)")
    add("--good-from", type=float, metavar="X", help="smallest good outcome (default: the middle of the range)")
    add("--held-out", type=float, default=0.1, metavar="SHARE", help="share of the customers held out (default 0.1)")
    add("--replies", type=count, default=200, metavar="N", help="held-out replies for validity (default 200)")
    add("--samples", type=count, default=4, metavar="N", help="simulated futures of each of them (default 4)")
    add("--rounds", type=int, default=4, metavar="N", help="maximum rounds of a future (default 4)")
    add("--max-tokens", type=count, default=128, metavar="N", help="maximum tokens of a turn (default 128)")
    add_options(parser, "seed", *JOB, "json")
    parser.set_defaults(run=run_of("offline.logs.prepare"))


def _add_reading(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILES", help=".jsonl, .json or .parquet files, or folders of them")
    for name, what in FIELDS.items():
        add(f"--{name}", metavar="FIELD", help=f"field with {what}, such as metadata.{name} (default: usual names)")
    add("--roles", metavar="NAME=ROLE,…", help="unusual names of roles, such as clerk=assistant")
    add("--keep-personal", action="store_true", help="do not mask email addresses, phone and card numbers")
