"""`upshot verify`: score responses in a file, or serve verdicts over HTTP."""

from __future__ import annotations

import argparse

from upshot.cli.options import add_options, check_address, port


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "verify",
        help="score responses against their references",
        description="Score JSONL rows {response, ground_truth} with a task's verifier: print accuracy and what is "
        "missing by reason; --out writes each row with its score. --serve answers `reward.manager: remote` instead.",
    )
    add = parser.add_argument
    add("file", nargs="?", help="JSONL or parquet; rows need 'response' and 'ground_truth'")
    add("--task", help="task or verifier, such as gsm8k; default: each row's data_source")
    add("--mode", help="answer mode of the verifier (gsm8k: strict, flexible; math: boxed, flexible)")
    add("--manager", default="inline", choices=["inline", "pool", "remote"], help="where to verify")
    add("--url", help="the scorer, with --manager remote")
    add("--workers", type=int, help="worker processes (default: one a core)")
    add("--seconds", type=float, help="time limit of one item (default 10; of a judge: its own)")
    add("--out", metavar="FILE", help="write each row with its score (and reason, where missing) to this JSONL file")
    add_options(parser, "option", "judge", "sandbox", "limit", "at_once", "json", at_once={"default": 256})
    add(
        "--verdict",
        default="profile",
        choices=["profile", "believe", "strict"],
        help="checks of programs that the judge cannot decide: believed by the row's profile, always, or left out",
    )
    add("--serve", action="store_true", help="serve verdicts over HTTP: POST /verify, GET /health")
    add("--host", default="127.0.0.1", help="address to serve at; anything but loopback needs a key")
    add("--port", type=port, default=8900, help="port to serve at (default 8900)")
    add("--api-key-file", help="file with the scorer's key; UPSHOT_SCORER_KEY is the other way")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify a file, or serve."""
    from upshot.offline import verify

    if args.serve:
        check_address(args.host, args.port)
    return verify.run(args)
