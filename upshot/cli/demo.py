"""`upshot demo`: the ideas, each shown in minutes on two CPU cores."""

from __future__ import annotations

import argparse

from upshot.core.errors import UserError, did_you_mean

DEMOS = {
    "quickstart": "a tiny model learns to ask before it answers (about two minutes)",
    "tree": "dr-grpo trained on the reply alone forgets how to answer, along the tree it does not (some minutes)",
    "classmates": "a tiny model learns to think so that others can follow, three seeds (about ten minutes on one core)",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "demo",
        help="the quickstart: a tiny model learns to ask before it answers (two minutes); or: tree, classmates",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train tiny models in a few ways and compare them on what they have not seen.\n\n"
        + "\n".join(f"  upshot demo {name}  {what}" for name, what in DEMOS.items()),
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="[NAME] key=value", help="which one, and overrides such as seed=1"
    )
    parser.add_argument("--quiet", action="store_true", help="print only the table")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Play the demo."""
    name, overrides = "quickstart", list(args.overrides)
    if overrides and "=" not in overrides[0]:
        name = overrides.pop(0)
    if name not in DEMOS:
        raise UserError(f"unknown demo '{name}'; {did_you_mean(name, DEMOS)}")
    from upshot.offline.demo import classmates, quickstart

    demos = {"quickstart": quickstart.quickstart, "tree": quickstart.tree, "classmates": classmates.demo}
    return demos[name](overrides, args.quiet, args.json)
