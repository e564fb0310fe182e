"""`upshot demo`: the idea of the multiturn-aware reward, shown in minutes on two CPU cores."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "demo",
        help="the quickstart: a tiny model learns to ask before it answers (about three minutes)",
        description="Train a tiny model three ways (demonstrations, single-reply reward, multiturn-aware reward) and "
        "compare them on held-out goals.",
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="overrides of the quickstart, such as seed=1"
    )
    parser.add_argument("--quiet", action="store_true", help="print only the table")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Play the demo."""
    from upshot.cli.console import make_reporter
    from upshot.evaluate.quickstart import quickstart

    return quickstart(args.overrides, lambda: make_reporter(args.quiet or args.json), args.quiet, args.json)
