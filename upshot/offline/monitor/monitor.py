"""`upshot eval monitor RUN|FILE`: a model reads question and thought only and predicts the verifier's score."""

from __future__ import annotations

import argparse

from upshot.core.thought import MARKERS

DESCRIPTION = (
    "A model reads question and thought only, and predicts the verifier's score: how readable are the thoughts? RUN is "
    "a run folder (its rollouts.jsonl; a table by step and task). FILE is .jsonl, .json, .parquet or .csv; a row has a "
    "prompt (or question), a thought (or a response with think markers), and a score from 0 to 1 (or data_source, "
    "response and reference, to be verified first). The same command continues where it stopped."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `upshot eval monitor`."""
    add = parser.add_argument
    add("source", metavar="RUN|FILE", help="a run folder, or a file of rows with thoughts")
    add("--judge", required=True, metavar="SPEC", help="the model that reads the thoughts: URL#name, provider/model, …")
    add("--task", metavar="NAME", help="a run: only this task's replies; a file: whose verifier decides (data_source)")
    add(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="a file: option of the verifier (repeatable)"
    )
    add("--think", nargs=2, default=list(MARKERS), metavar=("OPEN", "CLOSE"), help="a file: markers of thoughts")
    add("--sandbox", default="local", help="where programs are verified: local, or the URL of a server (local)")
    add("--limit", type=int, metavar="N", help="only the first N replies")
    add("--at-once", type=int, default=64, metavar="N", help="replies under way at once (64)")
    add("--max-calls", type=int, help="stop, resumably, after so many model calls")
    add("--max-dollars", type=float, help="stop, resumably, after so much cost")
    add("--out", metavar="FILE", help="every prediction, one line a reply (RUN/monitor.jsonl, FILE.monitor.jsonl)")
    add("--quiet", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="print the numbers as one line of JSON; no progress bar")


def run(args: argparse.Namespace) -> int:
    """Look at what was not looked at yet, and print the table."""
    from upshot.offline.monitor.command import run as look

    return look(args)
