"""Options that several verbs share, each said once.

Those of the reward are made of `api/settings.py`; here stand those of a job and those that name files and rows.
"""

from __future__ import annotations

import argparse
import importlib
import socket
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from upshot.api.settings import RewardOptions, Setting
from upshot.core.errors import UserError


def run_of(module: str) -> Callable[[argparse.Namespace], int]:
    """The `run` of a module, imported when it is called: no help waits for what a verb needs."""
    return lambda args: int(importlib.import_module(f"upshot.{module}").run(args))


def port(text: str) -> int:
    """A port number, for argparse."""
    if not text.isdecimal() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port; give a number from 0 (any free port) to 65535")
    return int(text)


def check_address(host: str, number: int) -> None:
    """Refuse an address that this machine does not have, or a port that is taken, before anything slow is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{number}: {error.strerror}; try another --port or --host") from error


def seconds(text: str) -> float:
    """A time limit, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def count(text: str) -> int:
    """How many of something there may be, for argparse: at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


SHARED: dict[str, dict[str, Any]] = {
    "at_once": {
        "flags": ("--at-once", "--concurrency"),
        "type": count,
        "default": 64,
        "metavar": "N",
        "help": "pieces of work under way at once; each model has its own limit of calls",
    },
    "max_calls": {"type": int, "metavar": "N", "help": "stop, resumably, after so many model calls"},
    "max_dollars": {"type": float, "metavar": "USD", "help": "stop, resumably, when so much is spent"},
    "call_seconds": {
        "type": seconds,
        "default": 120.0,
        "metavar": "S",
        "help": "most seconds of one call of a metric, verifier or user of your own, which is missing then",
    },
    "quiet": {"action": "store_true", "help": "no progress bar"},
    "json": {"action": "store_true", "help": "print the result as one line of JSON; no progress bar"},
    "limit": {"type": int, "metavar": "N", "help": "only the first N rows"},
    "metrics": {
        "flags": ("--metrics", "--metric"),
        "metavar": "NAME=WEIGHT,…",
        "help": "metrics and their weights, or '{NAME: {weight: 1, option: value}}'",
    },
    "option": {
        "action": "append",
        "default": [],
        "dest": "options",
        "metavar": "KEY=VALUE",
        "help": "an option of the verifier (repeatable)",
    },
    "goals_file": {
        "flags": ("--file",),
        "metavar": "SOURCE",
        "help": "the task's data: a file, folder or Hub name (default: the task's own set)",
    },
    "max_messages": {"type": int, "metavar": "N", "help": "most messages of a conversation (default: the task's, 14)"},
}
JOB = ("at_once", "max_calls", "max_dollars", "call_seconds", "quiet")
"""What `offline/job.py` takes."""
MODELS = ("policy", "user", "judge")


def add_options(parser: argparse.ArgumentParser, *names: str, **changes: dict[str, Any]) -> None:
    """Add shared options and settings of the reward; `changes` say what is different about one here."""
    kinds = get_type_hints(RewardOptions, include_extras=True)
    for name in names:
        own = dict(SHARED[name] if name in SHARED else _of_setting(name, *get_args(kinds[name])))
        own |= changes.get(name, {})
        flags = own.pop("flags", (f"--{name.replace('_', '-')}",))
        default = own.get("default")
        if default not in (None, "", []) and "(default" not in own["help"]:
            own["help"] += f" (default {default:g})" if isinstance(default, float) else f" (default {default})"
        parser.add_argument(*flags, **own)


def _of_setting(name: str, kind: Any, setting: Setting) -> dict[str, Any]:
    own: dict[str, Any] = {"default": setting.default, "help": setting.help}
    if kind in (int, float):
        own["type"] = kind
    if setting.choices:
        own["choices"] = setting.choices
    if name in MODELS:
        own |= {"metavar": "MODEL", "help": f"{setting.help}: URL#name, provider/model, folder"}
    return own
