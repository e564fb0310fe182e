"""Serve one model, or the models of a file, with an OpenAI-compatible API.

Serve one MODEL with the embedded engine; or start and watch the model servers that a FILE.yaml names (docs/serving.md),
show their state (status) or stop them (stop).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upshot.cli.options import add_options, check_address, count

OF_A_FILE = ("model", "file", "map", "while_used")
"""Options that may be given with a file; the file sets all others, for each server."""
READY = "all ready; Ctrl-C stops them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    models = "a Hugging Face folder or Hub name, a run folder (its best checkpoint), or smollm2-135m"
    add("model", metavar="MODEL|FILE.yaml|status|stop", help=models)
    add("file", nargs="?", metavar="FILE.yaml", help="with status and stop (default: what runs in this folder)")
    add("--map", default="", metavar="FILE", help="with a FILE.yaml: write the classmate map to this file")
    add("--while-used", action="store_true", help="with a FILE.yaml: stop when no run uses the servers any more")
    add_options(parser, "host", "port", port={"default": 8000})
    add("--name", default="", help="the name clients ask for (default: MODEL; for a folder, its last part)")
    add("--any-name", action="store_true", help="answer whatever model a request names (default: 404)")
    add("--api-key", default="", help="require this key from clients (default: $UPSHOT_API_KEY, else none)")
    add("--device", default="auto", help="cpu, cuda, cuda:1 …")
    add("--dtype", default="auto", help="float32, bfloat16 …; auto: bfloat16 where a GPU computes with it")
    add("--kv-gib", type=float, default=0.0, help="memory for keys and values, in GiB (default: by device)")
    share = "share of the GPU's memory for weights, keys and values (default: what is free)"
    add("--memory", type=float, default=0.0, help=share)
    add("--max-running", type=int, default=0, help="sequences computed concurrently")
    add("--max-waiting", type=int, default=1024, help="sequences that may wait before clients get 429 (default 1024)")
    add("--max-tokens", type=count, default=1024, help="reply limit for chat requests that set none (default 1024)")
    parsers = (
        "how the model writes tool calls: hermes, llama3, mistral, mistral-args, none, or your own as "
        "package.module:Class (default: by its chat template)"
    )
    add("--tool-parser", default="auto", help=parsers)
    parser.set_defaults(default_of=parser.get_default)


def run(args: argparse.Namespace) -> int:
    """Serve one model until interrupted; or what a file says."""
    if args.model in ("status", "stop") or args.model.endswith((".yaml", ".yml")):
        return _run_file(args)
    return _run_model(args)


def name_of(model: str) -> str:
    """The name a model is served under: for a folder its last part, since clients do not need the path."""
    folder = Path(model)
    return folder.resolve().name if folder.is_dir() else model


def _run_model(args: argparse.Namespace) -> int:
    import os

    from upshot.core.errors import UserError
    from upshot.core.http_server import demand_key
    from upshot.models.tool_calls.base import parser_for

    if args.file or args.map or args.while_used:
        extra = args.file or ("--map" if args.map else "--while-used")
        raise UserError(f"'{extra}' applies only to a FILE.yaml, but '{args.model}' is a model")
    if args.memory and args.kv_gib:
        raise UserError("--memory and --kv-gib set the same thing; give only one")
    key = args.api_key or os.environ.get("UPSHOT_API_KEY", "")
    demand_key(args.host, key, "set UPSHOT_API_KEY or --api-key")
    check_address(args.host, args.port)
    parser_for("", args.tool_parser)
    import asyncio
    import logging

    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every write to a client that went away
    from upshot.core.http_listener import listen, serve_app
    from upshot.engine.engine import Engine, EngineSettings
    from upshot.models.engine_model import EngineModel
    from upshot.models.local import describe_choice, load_whole, pick_device
    from upshot.serving.openai.allowance import Allowance
    from upshot.serving.openai.server import OpenAIServer

    allowance = Allowance.hold(args.memory, pick_device(args.device)) if args.memory else None
    module, tokenizer = load_whole(args.model, args.dtype, args.device)
    kv_bytes = allowance.kv_bytes() if allowance else int(args.kv_gib * 2**30)
    settings = EngineSettings(kv_bytes=kv_bytes, max_running=args.max_running, max_waiting=args.max_waiting)
    model = EngineModel(Engine(module, settings=settings), tokenizer, args.name or name_of(args.model))
    server = OpenAIServer(model, key, args.max_tokens, args.any_name, args.tool_parser)
    if chosen := describe_choice(args.model):
        print(chosen, flush=True)
    with listen(args.host, args.port) as listener:  # first: whoever reads the line may ask at once
        address = f"http://{args.host}:{listener.getsockname()[1]}/v1"
        print(f"serving {model.name} at {address} (health: /health, metrics: /metrics)", flush=True)
        asyncio.run(serve_app(server.app, listener, drain_s=5))
    return 0


def _run_file(args: argparse.Namespace) -> int:
    """Start and watch the servers of a file, show their state, or stop them."""
    from upshot.core.errors import UserError

    for option, value in vars(args).items():
        if option not in OF_A_FILE and value != args.default_of(option):
            flag = f"--{option.replace('_', '-')}"
            raise UserError(f"{flag} applies only to `upshot serve MODEL`; set it in the serve file (docs/serving.md)")
    if args.model in ("status", "stop"):
        if args.map or args.while_used:
            raise UserError(f"--map and --while-used apply only to `upshot serve FILE.yaml`, not to {args.model}")
        return _status(args.file) if args.model == "status" else _stop(args.file)
    if args.file:
        raise UserError(f"one serve file at a time; leave out '{args.file}'")
    return _start(Path(args.model), Path(args.map) if args.map else None, args.while_used)


def _start(file: Path, map_file: Path | None, while_used: bool) -> int:
    import asyncio
    import fcntl

    from upshot.core.errors import UserError
    from upshot.core.files import check_writable
    from upshot.serving.servers.file import read
    from upshot.serving.servers.state import SUPERVISOR_LOCK, folder_of, lock, read_state
    from upshot.serving.servers.supervisor import Supervisor, check_map

    config, folder = read(file), folder_of(file)
    if map_file is not None:
        check_map(config)
        check_writable(map_file, "--map")
    with lock(folder / SUPERVISOR_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
        if not free:
            pid = (read_state(folder) or {}).get("pid", "of unknown number")
            raise UserError(f"the servers of '{file}' are already running (process {pid}); `upshot serve stop {file}`")
        supervisor = Supervisor(file.resolve(), config, folder, _say, map_file)
        _say(f"starting {len(config.servers)} servers; logs in {folder}")

        asyncio.run(supervisor.run(lambda: _say(f"{table(supervisor.state())}\n{READY}"), while_used))
        _say("all stopped")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def table(state: Mapping[str, Any]) -> str:
    """The servers, one line each."""
    rows = [("server", "status", "engine", "where", "url", "process", "start", "restarts", "model")]
    for name, server in state["servers"].items():
        gpus = ", ".join(map(str, server["devices"]))
        where = f"GPU {gpus} ({server['memory']:.0%})" if gpus else "CPU"
        took = f"{server['seconds']:.1f} s" if server["seconds"] else "-"
        rest = (str(server["pid"] or "-"), took, str(server["restarts"]), server["model"])
        rows.append((name, server["status"], server["engine"], where, server["url"], *rest))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _files(file: str | None) -> list[str]:
    """The given serve file, or else those in this folder whose servers are running."""
    from upshot.core.errors import UserError
    from upshot.serving.servers.state import SUFFIX, folder_of, read_state

    if file is None:
        states = [read_state(folder) for folder in sorted(Path().glob(f"*{SUFFIX}"))]
        return [state["file"] for state in states if state is not None]
    if not Path(file).expanduser().is_file() and not folder_of(file).is_dir():
        raise UserError(f"the serve file '{file}' does not exist")
    return [file]


def _status(file: str | None) -> int:
    """0: all servers run; 1: some do not, or none are up."""
    from upshot.serving.servers.state import folder_of, read_state, ready

    states = [read_state(folder_of(name)) for name in _files(file)]
    for state in states:
        if state is not None:
            _say(f"{state['file']}, process {state['pid']} on {state['machine']}\n{table(state)}")
    if not any(states):
        _say(f"no servers of {file} are up" if file else "no servers of a serve file in this folder are up")
    return 0 if states and all(ready(state) for state in states) else 1


def _stop(file: str | None) -> int:
    from upshot.core.errors import UserError
    from upshot.serving.servers.state import stop

    files = _files(file)
    if file is None and len(files) > 1:
        raise UserError(f"several serve files are in use: name one of {', '.join(files)}")
    stopped = [name for name in files if stop(name)]
    _say(f"stopped the servers of {stopped[0]}" if stopped else "nothing to stop")
    return 0
