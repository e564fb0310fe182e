"""`upshot sandbox`: serve the sandbox over HTTP."""

import argparse

from upshot.cli.options import check_address, port


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "sandbox",
        help="run untrusted programs behind an HTTP API",
        description="Serve /test_program, /test_program_stdio, /run_code, /batch, /sessions, /health and /metrics.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; anything but loopback needs a key")
    parser.add_argument("--port", type=port, default=8001)
    parser.add_argument("--slots", type=int, default=None, help="programs at once (default: 8 per core)")
    parser.add_argument("--queue", type=int, default=4096, help="programs that may wait before clients get 429")
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="LAYER",
        help="refuse to start without this layer: namespaces, landlock, seccomp, uid, cgroup (may be repeated)",
    )
    parser.add_argument("--max-seconds", type=float, default=6.0, help="CPU seconds of a program that names no limit")
    parser.add_argument("--memory-mb", type=int, default=512, help="memory of a program that names no limit")
    parser.add_argument("--max-request-mb", type=int, default=16, help="largest request")
    parser.add_argument(
        "--session-idle-seconds", type=float, default=600.0, help="a Python session unused for so long is ended"
    )
    parser.add_argument(
        "--api-key-file", default=None, help="file with the API key; UPSHOT_SANDBOX_KEY is the other way"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    import logging

    from upshot.core.http_server import find_key
    from upshot.sandbox.connection import KEY_VARIABLE
    from upshot.sandbox.http.server import serve
    from upshot.sandbox.limits import Limits
    from upshot.sandbox.local.pool import Sandbox

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    key = find_key(args.api_key_file, KEY_VARIABLE)
    check_address(args.host, args.port)
    sandbox = Sandbox(
        slots=args.slots,
        require=args.require,
        limits=Limits(cpu_seconds=args.max_seconds, memory_mb=args.memory_mb),
        queue=args.queue,
        session_idle_seconds=args.session_idle_seconds,
    )
    serve(sandbox, args.host, args.port, key, args.max_request_mb << 20)
    return 0
