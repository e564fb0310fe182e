"""`upshot serve MODEL`: an OpenAI-compatible server on the embedded engine."""

from __future__ import annotations

import argparse

from upshot.cli.address import check_address, port


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb's options."""
    parser = subparsers.add_parser("serve", help="serve a model with an OpenAI-compatible API")
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder or hub name, or smollm2-135m")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; anything but loopback needs a key")
    parser.add_argument("--port", type=port, default=8000)
    parser.add_argument("--name", default="", help="the name clients ask for (default: MODEL)")
    parser.add_argument("--any-name", action="store_true", help="answer whatever model a request names (default: 404)")
    parser.add_argument("--api-key", default="", help="ask clients for this key (default: $UPSHOT_API_KEY, else none)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 …")
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16 …; auto: float32 on the CPU, bfloat16 on a GPU"
    )
    parser.add_argument("--kv-gib", type=float, default=0.0, help="memory for keys and values (default: by device)")
    parser.add_argument("--max-running", type=int, default=0, help="sequences computed at once")
    parser.add_argument("--max-waiting", type=int, default=1024, help="sequences that may wait before clients get 429")
    parser.add_argument("--max-tokens", type=int, default=1024, help="limit of chat requests that bring none")
    parser.add_argument(
        "--tool-parser",
        default="auto",
        help="how the model writes tool calls: hermes, llama3, mistral, none, or your "
        "own as package.module:Class (default: what its chat template says)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the model and serve until interrupted."""
    import os

    from upshot.models.calls.base import parser_for
    from upshot.serving import demand_key

    key = args.api_key or os.environ.get("UPSHOT_API_KEY", "")
    demand_key(args.host, key, "set UPSHOT_API_KEY or --api-key")
    check_address(args.host, args.port)
    parser_for("", args.tool_parser)
    import logging

    import uvicorn

    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every write to a client that went away
    from upshot.engine.engine import Engine, EngineSettings
    from upshot.engine.model import EngineModel
    from upshot.engine.server import Server
    from upshot.models.local import load_local

    module, tokenizer = load_local(args.model, args.dtype, args.device)
    settings = EngineSettings(
        kv_bytes=int(args.kv_gib * 2**30), max_running=args.max_running, max_waiting=args.max_waiting
    )
    model = EngineModel(Engine(module, settings=settings), tokenizer, args.name or args.model)
    server = Server(model, key, args.max_tokens, args.any_name, args.tool_parser)
    print(f"serving {model.name} at http://{args.host}:{args.port}/v1 (health: /health, metrics: /metrics)", flush=True)
    uvicorn.run(server.app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=5)
    return 0
