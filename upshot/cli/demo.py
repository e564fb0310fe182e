"""Watch a tiny model learn to ask before it answers (about two minutes); also: tree, classmates.

Train tiny models in several ways and compare them on held-out data.
"""

from __future__ import annotations

import argparse

from upshot.cli.options import add_options
from upshot.core.errors import UserError, did_you_mean

DEMOS = {
    "quickstart": "a tiny model learns to ask before it answers (about two minutes)",
    "tree": "dr-grpo forgets how to answer if only the reply is trained, but not along the tree (some minutes)",
    "classmates": "a tiny model learns to think so that others can follow, three seeds (about ten minutes on one core)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    demos = "\n".join(f"  upshot demo {name}  {what}" for name, what in DEMOS.items())
    parser.description = f"{parser.description}\n\n{demos}"
    named = {"metavar": "[NAME] key=value", "help": "which demo, and overrides such as seed=1"}
    quiet, json = {"help": "print only the table"}, {"help": "print the table as JSON"}
    add_options(parser, "overrides", "quiet", "json", overrides=named, quiet=quiet, json=json)


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
