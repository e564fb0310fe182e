"""`upshot score FILE`: rewards of conversations on disk."""

from __future__ import annotations

import argparse

from upshot.config.renamed import refuse_old_options


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
    parser.add_argument("--out", help="where the results go (default: FILE.scores.jsonl)")
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME[=WEIGHT]",
        help="a metric and its weight, or NAME={weight: 1, option: value}; repeatable (accuracy, interactivity)",
    )
    for role, why in (
        ("judge", "judges and extracts"),
        ("user", "plays the user in the futures"),
        ("policy", "speaks as the assistant in the futures"),
    ):
        parser.add_argument(
            f"--{role}", metavar="MODEL", help=f"the model that {why}: URL#name, provider/model, folder"
        )
    refuse_old_options(parser)
    parser.add_argument("--rounds", type=int, default=0, help="rounds a future may last; 0 scores what is there (0)")
    parser.add_argument("--samples", type=int, default=3, help="futures per reply (3)")
    parser.add_argument("--persona", default="plain", help="of the simulated user; 'mixed' draws one per row (plain)")
    parser.add_argument("--vagueness", default="medium", choices=["low", "medium", "high"], help="of the user (medium)")
    parser.add_argument("--tokenizer", help="of the policy, for token_amount: a folder or a Hub name")
    parser.add_argument("--max-reply-tokens", type=int, default=0, help="longer replies are over-long; 0: none is (0)")
    parser.add_argument(
        "--overlong",
        default="score",
        choices=["score", "missing", "penalty"],
        help="over-long replies are scored like others, missing, or get -1 (score)",
    )
    parser.add_argument("--task", help="the task whose verifier scores (metric 'verifier')")
    parser.add_argument("--sandbox", default="local", help="where programs run: local, or the URL of a server (local)")
    parser.add_argument("--limit", type=int, help="score only the first rows")
    parser.add_argument("--at-once", type=int, default=64, help="rows under way at once (64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-calls", type=int, help="stop, resumably, after so many model calls")
    parser.add_argument("--max-dollars", type=float, help="stop, resumably, after so much cost")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Score the file; 0 when every reply has a reward, 1 when some are missing."""
    from upshot.offline.score import score_file

    return score_file(args)
