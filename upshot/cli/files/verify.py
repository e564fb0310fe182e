"""Score responses against their references, or serve verdicts over HTTP.

Score JSONL rows {response, ground_truth} with a task's verifier: print the accuracy and what is missing, by reason;
--out writes each row with its score. --serve answers `reward.manager: remote` instead.
"""

from __future__ import annotations

import argparse

from upshot.cli.options import add_options, count, run_of

run = run_of("offline.verify")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("file", nargs="?", help="JSONL or parquet; rows need 'response' and 'ground_truth'")
    add("--task", help="task or verifier, such as gsm8k (default: each row's data_source)")
    add("--mode", help="answer mode of the verifier (gsm8k: strict, flexible; math: boxed, flexible)")
    add("--manager", default="inline", choices=["inline", "pool", "remote"], help="where to verify (default inline)")
    add("--url", help="address of the scorer, with --manager remote")
    add("--workers", type=count, help="worker processes (default: one per core)")
    add("--seconds", type=float, help="time limit per item (default 10; for a judge: its own)")
    add("--out", metavar="FILE", help="write each row with its score (or the reason it is missing) to this JSONL file")
    add_options(parser, "option", "judge", "sandbox", "limit", "at_once", "json", at_once={"default": 256})
    checks = "checks that the judge cannot decide: believed as the row's profile says, always believed, or left out"
    add("--verdict", default="profile", choices=["profile", "believe", "strict"], help=checks)
    add("--serve", action="store_true", help="serve verdicts over HTTP: POST /verify, GET /health")
    add_options(parser, "host", "port", port={"default": 8900})
    add("--api-key-file", help="file with the scorer's key (or set UPSHOT_SCORER_KEY)")
