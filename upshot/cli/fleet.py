"""`upshot serve FILE.yaml`, `upshot serve status|stop`: a set of model servers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OF_ONE_MODEL = (
    *("host", "port", "name", "any_name", "api_key", "device", "dtype", "kv_gib", "memory"),
    *("max_running", "max_waiting", "max_tokens", "tool_parser"),
)
"""Options that a file says for each server."""


def run_fleet(args: argparse.Namespace) -> int:
    """Start and watch the servers of a file, or tell of them, or stop them."""
    from upshot.core.errors import UserError

    for option in OF_ONE_MODEL:
        if getattr(args, option) != args.default_of(option):
            flag = f"--{option.replace('_', '-')}"
            raise UserError(f"{flag} is for `upshot serve MODEL`; a serve file says it itself (see docs/serving.md)")
    if args.model in ("status", "stop"):
        if args.map or args.while_used:
            raise UserError(f"--map and --while-used are for `upshot serve FILE.yaml`, not for {args.model}")
        return _status(args.file) if args.model == "status" else _stop(args.file)
    if args.file:
        raise UserError(f"one serve file at a time; '{args.file}' is a second")
    return _start(Path(args.model), Path(args.map) if args.map else None, args.while_used)


def _start(file: Path, map_file: Path | None, while_used: bool) -> int:
    import asyncio
    import fcntl

    from upshot.core.errors import UserError
    from upshot.core.files import check_writable
    from upshot.serving.servers.classmates import check_map
    from upshot.serving.servers.file import read
    from upshot.serving.servers.state import FLEET_LOCK, folder_of, lock, read_state
    from upshot.serving.servers.watch import Supervisor

    config, folder = read(file), folder_of(file)
    if map_file is not None:
        check_map(config)
        check_writable(map_file, "--map")
    with lock(folder / FLEET_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
        if not free:
            pid = (read_state(folder) or {}).get("pid", "of unknown number")
            raise UserError(f"the servers of '{file}' are up already (process {pid}); `upshot serve stop {file}`")
        fleet = Supervisor(file.resolve(), config, folder, _say, map_file)
        _say(f"starting {len(config.servers)} servers; logs in {folder}")

        def tell() -> None:
            _say(table(fleet.state()) + "\nall ready; Ctrl-C stops them")

        asyncio.run(fleet.run(tell, while_used))
        _say("all stopped")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def table(state: Mapping[str, Any]) -> str:
    """The servers, a line each."""
    rows = [("server", "status", "engine", "where", "url", "process", "start", "restarts", "model")]
    for name, server in state["servers"].items():
        gpus = ", ".join(map(str, server["devices"]))
        where = f"GPU {gpus} ({server['memory']:.0%})" if gpus else "CPU"
        took = f"{server['seconds']:.1f} s" if server["seconds"] else "-"
        told = (str(server["pid"] or "-"), took, str(server["restarts"]), server["model"])
        rows.append((name, server["status"], server["engine"], where, server["url"], *told))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _files(file: str | None) -> list[str]:
    """The serve file that is meant: the given one, or those in this folder whose servers are up."""
    from upshot.core.errors import UserError
    from upshot.serving.servers.state import folder_of, read_state

    if file is None:
        states = [read_state(folder) for folder in sorted(Path().glob("*.fleet"))]
        return [state["file"] for state in states if state is not None]
    if not Path(file).expanduser().is_file() and not folder_of(file).is_dir():
        raise UserError(f"no such serve file: '{file}'")
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
        raise UserError(f"several are up: name one of {', '.join(files)}")
    stopped = [name for name in files if stop(name)]
    _say(f"stopped the servers of {stopped[0]}" if stopped else "nothing to stop")
    return 0
