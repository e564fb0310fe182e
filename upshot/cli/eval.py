"""`upshot eval`: models side by side on held-out goals; the judge against labelled rows; a monitor of thoughts."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    from upshot.offline.evaluate import table

    parser = subparsers.add_parser(
        "eval",
        help="compare models on held-out goals; `eval judge` scores the judge, `eval monitor` reads thoughts",
        description="Play whole conversations on held-out goals and print the table.",
        epilog="`upshot eval judge FILE` reports how well a judge agrees with labelled rows, `upshot eval monitor "
        "RUN|FILE` how well a model that reads question and thought only predicts the verifier's score.",
    )
    table.add_arguments(parser)
    parser.set_defaults(run=table.run)


def inner_parser(verb: str) -> argparse.ArgumentParser:
    """The parser of `upshot eval judge` or `upshot eval monitor`."""
    from upshot.offline import judge
    from upshot.offline.monitor import monitor

    own = {"judge": judge, "monitor": monitor}[verb]
    parser = argparse.ArgumentParser(prog=f"upshot eval {verb}", description=own.DESCRIPTION)
    own.add_arguments(parser)
    parser.set_defaults(run=own.run)
    return parser
