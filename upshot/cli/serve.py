"""`upshot serve MODEL`: an OpenAI-compatible server on the embedded engine. Of a FILE.yaml: `cli/fleet.py`."""

from __future__ import annotations

import argparse

from upshot.cli.options import check_address, port


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb's options."""
    parser = subparsers.add_parser(
        "serve",
        help="serve one model, or those of a file, with an OpenAI-compatible API",
        description="Serve one MODEL by the embedded engine; or start and watch the model servers that a FILE.yaml "
        "names (docs/serving.md), see how they stand (status) and stop them (stop).",
    )
    parser.add_argument(
        "model", metavar="MODEL|FILE.yaml|status|stop", help="a Hugging Face folder or hub name, or smollm2-135m"
    )
    parser.add_argument("file", nargs="?", metavar="FILE.yaml", help="of status and stop; left out: those up here")
    parser.add_argument("--map", default="", metavar="FILE", help="of a FILE.yaml: write the classmate map there")
    parser.add_argument("--while-used", action="store_true", help="of a FILE.yaml: stop when no run uses it any more")
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
    parser.add_argument(
        "--memory",
        type=float,
        default=0.0,
        help="share of the GPU's memory for weights, keys and values (default: free)",
    )
    parser.add_argument("--max-running", type=int, default=0, help="sequences computed at once")
    parser.add_argument("--max-waiting", type=int, default=1024, help="sequences that may wait before clients get 429")
    parser.add_argument("--max-tokens", type=int, default=1024, help="limit of chat requests that bring none")
    parser.add_argument(
        "--tool-parser",
        default="auto",
        help="how the model writes tool calls: hermes, llama3, mistral, mistral-args, none, or your "
        "own as package.module:Class (default: what its chat template says)",
    )
    parser.set_defaults(run=run, default_of=parser.get_default)


def run(args: argparse.Namespace) -> int:
    """Load the model and serve until interrupted; or what the file says."""
    import os

    from upshot.core.errors import UserError
    from upshot.core.http import demand_key
    from upshot.models.tool_calls.base import parser_for

    if args.model in ("status", "stop") or args.model.endswith((".yaml", ".yml")):
        from upshot.cli.fleet import run_fleet

        return run_fleet(args)
    if args.file or args.map or args.while_used:
        extra = args.file or ("--map" if args.map else "--while-used")
        raise UserError(f"'{extra}' goes with a FILE.yaml, and '{args.model}' is a model")
    if args.memory and args.kv_gib:
        raise UserError("--memory and --kv-gib say the same in two ways; give one")
    key = args.api_key or os.environ.get("UPSHOT_API_KEY", "")
    demand_key(args.host, key, "set UPSHOT_API_KEY or --api-key")
    check_address(args.host, args.port)
    parser_for("", args.tool_parser)
    import logging

    import uvicorn

    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every write to a client that went away
    from upshot.engine.engine import Engine, EngineSettings
    from upshot.models.engine_model import EngineModel
    from upshot.models.local import load_local, pick_device
    from upshot.serving.openai.allowance import Allowance
    from upshot.serving.openai.server import OpenAIServer

    allowance = Allowance.hold(args.memory, pick_device(args.device)) if args.memory else None
    module, tokenizer = load_local(args.model, args.dtype, args.device)
    kv_bytes = allowance.kv_bytes() if allowance else int(args.kv_gib * 2**30)
    settings = EngineSettings(kv_bytes=kv_bytes, max_running=args.max_running, max_waiting=args.max_waiting)
    model = EngineModel(Engine(module, settings=settings), tokenizer, args.name or args.model)
    server = OpenAIServer(model, key, args.max_tokens, args.any_name, args.tool_parser)
    print(f"serving {model.name} at http://{args.host}:{args.port}/v1 (health: /health, metrics: /metrics)", flush=True)
    uvicorn.run(server.app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=5)
    return 0
