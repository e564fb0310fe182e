"""`upshot score FILE`: rewards of conversations on disk."""

from __future__ import annotations

import argparse

from upshot.cli.options import JOB, add_options, run_of


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "score",
        help="score conversations on disk, with or without futures",
        description="Score the conversations of a .jsonl, .json, .parquet or .csv file. A row has 'prompt' and "
        "'completion' (or a list of 'completions'), or a whole conversation under 'messages'; beside them 'goal' and "
        "'reference'. Results go to --out, one line a reply; the same command continues where it stopped.",
    )
    parser.add_argument("file", help="the conversations")
    parser.add_argument("--out", metavar="FILE", help="where the results go (default: FILE.scores.jsonl)")
    add_options(
        parser,
        *("metrics", "judge", "user", "policy", "rounds", "samples", "max_tokens", "temperature", "system"),
        *("tokenizer", "max_reply_tokens", "overlong", "task", "sandbox", "limit", "seed", *JOB),
        metrics={"action": "append", "default": [], "metavar": "NAME[=WEIGHT]"},
        rounds={"default": 0},
    )
    parser.add_argument("--persona", default="plain", help="of the simulated user; 'mixed' draws one per row (plain)")
    parser.add_argument("--vagueness", default="medium", choices=["low", "medium", "high"], help="of the user (medium)")
    parser.set_defaults(run=run_of("offline.score"))
