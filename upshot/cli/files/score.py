"""Score conversations on disk, with or without futures.

Score the conversations of a .jsonl, .json, .parquet or .csv file. A row has 'prompt' and 'completion' (or a list of
'completions'), or a whole conversation under 'messages'; beside them 'goal' and 'reference'. Results go to --out, one
line per reply; the same command continues where it stopped.
"""

from __future__ import annotations

import argparse

from upshot.cli.options import JOB, add_options, run_of

run = run_of("offline.score")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("file", help="the conversations")
    add("--out", metavar="FILE", help="file of the results (default: FILE.scores.jsonl)")
    add_options(
        parser,
        *("metrics", "judge", "user", "policy", "rounds", "samples", "max_tokens", "temperature", "system"),
        *("tokenizer", "max_reply_tokens", "overlong", "task", "sandbox", "limit", "seed", *JOB),
        metrics={"action": "append", "default": [], "metavar": "NAME[=WEIGHT]"},
        rounds={"default": 0},
    )
    personas = "persona of the simulated user; 'mixed' draws one per row (default plain)"
    add("--persona", default="plain", help=personas)
    vagueness = "vagueness of the simulated user (default medium)"
    add("--vagueness", default="medium", choices=["low", "medium", "high"], help=vagueness)
