"""`upshot verify`: score responses in a file, or serve verdicts over HTTP."""

import argparse

from upshot.cli.address import check_address, port


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "verify",
        help="score responses against their references",
        description="Score JSONL rows {response, ground_truth} with a task's verifier: print accuracy and what is "
        "missing by reason; --out writes each row with its score. --serve answers `reward.manager: remote` instead.",
    )
    parser.add_argument("file", nargs="?", help="JSONL or parquet; rows need 'response' and 'ground_truth'")
    parser.add_argument("--task", help="task or verifier, such as gsm8k; default: each row's data_source")
    parser.add_argument("--mode", help="answer mode of the verifier (gsm8k: strict, flexible; math: boxed, flexible)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="other verifier options")
    parser.add_argument("--manager", default="inline", choices=["inline", "pool", "remote"], help="where to verify")
    parser.add_argument("--url", help="the scorer, with --manager remote")
    parser.add_argument("--workers", type=int, help="worker processes (default: one a core)")
    parser.add_argument("--seconds", type=float, help="time limit of one item (default 10; of a judge: its own)")
    parser.add_argument("--judge", help="model of judged verifiers: a URL, provider/model or folder")
    parser.add_argument("--sandbox", default="local", help="where programs run: local, a URL, or subprocess (unsafe)")
    parser.add_argument("--out", help="write each row with its score (and reason, where missing) to this JSONL file")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--serve", action="store_true", help="serve verdicts over HTTP: POST /verify, GET /health")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve at; anything but loopback needs a key")
    parser.add_argument("--port", type=port, default=8900, help="port to serve at (default 8900)")
    parser.add_argument("--api-key-file", help="file with the scorer's key; UPSHOT_SCORER_KEY is the other way")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify a file, or serve."""
    from upshot.offline.verify import VerifySettings, serve, verify_file

    settings = VerifySettings(
        task=args.task,
        mode=args.mode,
        options=args.option,
        manager=args.manager,
        url=args.url,
        workers=args.workers,
        seconds=args.seconds,
        judge=args.judge,
        sandbox=args.sandbox,
    )
    if args.serve:
        from upshot.core.http_server import find_key
        from upshot.rewards.workers.scorer import KEY_VARIABLE

        key = find_key(args.api_key_file, KEY_VARIABLE)
        check_address(args.host, args.port)
        return serve(settings, args.host, args.port, key)
    return verify_file(args.file, settings, args.out, args.json)
