"""`upshot eval --task … --models base=…,proactive=…,trained=…`: the paper's table from whole conversations."""

from __future__ import annotations

import argparse

from upshot.offline.data.arguments import add_call_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the table."""
    add = parser.add_argument
    add("--task", metavar="NAME|FILE", help="math-hard, medium, bigcodebench, abg-coqa, or a file of goals")
    add("--file", metavar="SOURCE", help="the task's data: a file, folder or Hub name (default: the task's own set)")
    add("--models", metavar="NAME=SPEC,…", help="the rows of the table, such as base=SPEC,proactive=SPEC,trained=SPEC")
    add("--user", metavar="SPEC", help="the simulated user's model, or 'script' for lines of the goal")
    add("--judge", metavar="SPEC", help="the judge's model; needed by judged metrics")
    add("--out", metavar="DIR", help="folder of table.json, table.md and rollouts.jsonl (default: eval-TASK)")
    add("--split", help="held-out goals: test, validation, train or all (default: test, else validation)")
    add("--goals", type=int, metavar="N", help="at most so many goals (default: all of the split)")
    add("--metrics", metavar="NAME=WEIGHT,…", help="metrics, the task metric first (default: the task's own)")
    add(
        "--system",
        action="append",
        default=[],
        metavar="NAME=PROMPT",
        help="system prompt of a row: plain, proactive, none or a text file (default: proactive for the row of that "
        "name, plain for the others)",
    )
    add(
        "--tokenizer",
        metavar="NAME",
        help="whose tokens token_amount counts (default: as each endpoint counts)",
    )
    add("--max-messages", type=int, metavar="N", help="most messages of a conversation (default 14)")
    add("--max-tokens", type=int, default=1024, help="most tokens of a reply (default 1024)")
    add("--temperature", type=float, default=1.0, help="of the replies (default 1.0)")
    add("--concurrency", type=int, default=64, help="conversations at once (default 64)")
    add("--max-calls", type=int, help="stop, resumably, after so many model calls")
    add("--max-dollars", type=float, help="stop, resumably, when so much is spent")
    add_call_seconds(parser)
    add("--seed", type=int, default=0)
    add("--quiet", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="print the table as one line of JSON; no progress bar")


def run(args: argparse.Namespace) -> int:
    """Play what is not played yet, print the table and save it."""
    from upshot.offline.evaluate.table_command import run as evaluate

    return evaluate(args)
