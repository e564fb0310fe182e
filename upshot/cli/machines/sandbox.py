"""Run untrusted programs behind an HTTP API.

Serve /test_program, /test_program_stdio, /run_code, /run, /sessions, /health and /metrics.
"""

import argparse

from upshot.cli.options import add_options, check_address


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add_options(parser, "host", "port", port={"default": 8001})
    add("--slots", type=int, help="programs run concurrently (default: 8 per core)")
    add("--queue", type=int, default=4096, help="programs that may wait before clients get 429 (default 4096)")
    layers = "refuse to start without this layer: namespaces, landlock, seccomp, uid or cgroup (repeatable)"
    add("--require", action="append", default=[], metavar="LAYER", help=layers)
    add("--max-seconds", type=float, default=6.0, help="CPU seconds for programs that set no limit (default 6)")
    add("--memory-mb", type=int, default=512, help="memory for programs that set no limit (default 512)")
    add("--max-request-mb", type=int, default=16, help="largest request (default 16)")
    add("--session-idle-seconds", type=float, default=600.0, help="end a Python session idle for this long (600)")
    add("--api-key-file", help="file with the API key (or set UPSHOT_SANDBOX_KEY)")


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
    limits, idle = Limits(cpu_seconds=args.max_seconds, memory_mb=args.memory_mb), args.session_idle_seconds
    sandbox = Sandbox(args.slots, require=args.require, limits=limits, queue=args.queue, session_idle_seconds=idle)
    serve(sandbox, args.host, args.port, key, args.max_request_mb << 20)
    return 0
