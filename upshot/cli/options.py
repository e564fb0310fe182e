"""Options that several verbs share, each defined once, and the texts of `--help`.

Those of the reward come from `api/settings.py`. A verb is described by the docstring of its file: the first line is
its line in `upshot --help`, the rest is the text above its options.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from upshot.api.settings import RewardOptions, Setting


def describe(text: str | None) -> dict[str, Any]:
    """`help` and `description` of a verb, from the docstring of its file or function: first line, then the rest."""
    first, _, rest = inspect.cleandoc(text or "").partition("\n\n")
    return {"help": first.rstrip(".").replace("%", "%%"), "description": rest or first}  # argparse formats `help` alone


def add_parts(parser: argparse.ArgumentParser, **parts: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the verbs below a verb; each function adds the arguments of one, and its docstring describes it."""
    verbs = parser.add_subparsers(metavar="|".join(parts), required=True)
    for name, add_arguments in parts.items():
        add_arguments(verbs.add_parser(name, **describe(add_arguments.__doc__)))


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the verbs below a verb, by their names."""
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: part for action in actions for name, part in action.choices.items()}


def run_of(module: str) -> Callable[[argparse.Namespace], int]:
    """The `run` of a module, imported when it is called, so that `--help` does not wait for heavy imports."""
    return lambda args: int(importlib.import_module(f"upshot.{module}").run(args))


def port(text: str) -> int:
    """A port number, for argparse."""
    if not text.isdecimal() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port; give a number from 0 (any free port) to 65535")
    return int(text)


def check_address(host: str, number: int) -> None:
    """Refuse an address that this machine does not have, or a port that is taken, before anything slow is loaded."""
    from upshot.core.http_listener import listen

    listen(host, number).close()


def seconds(text: str) -> float:
    """A time limit, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def count(text: str) -> int:
    """How many of something there may be, for argparse: at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


JSON = "print the result as one line of JSON, without a progress bar"
AT_ONCE = "items processed concurrently; each model also has its own concurrency limit"
CALL = "time limit for one call to your own metric, verifier or user; beyond it the score is missing"
METRICS = "metrics and their weights, or '{NAME: {weight: 1, option: value}}'"
LONGEST = "longest conversation, in messages (default: the task's, 14)"
OPTION = "an option of the verifier (repeatable)"
SOURCE = "the task's data: a file, folder or Hub name (default: the task's own dataset)"
SHARED: dict[str, dict[str, Any]] = {
    "recipe": {"flags": ("recipe",), "help": "recipe name, file or run folder"},
    "overrides": {"flags": ("overrides",), "nargs": "*", "default": [], "metavar": "key=value", "help": "recipe keys"},
    "at_once": {"flags": ("--at-once", "--concurrency"), "type": count, "default": 64, "metavar": "N", "help": AT_ONCE},
    "max_calls": {"type": int, "metavar": "N", "help": "stop after N model calls; the same command continues"},
    "max_dollars": {"type": float, "metavar": "USD", "help": "stop once this is spent; the same command continues"},
    "call_seconds": {"type": seconds, "default": 120.0, "metavar": "S", "help": CALL},
    "quiet": {"action": "store_true", "help": "show no progress bar"},
    "json": {"action": "store_true", "help": JSON},
    "limit": {"type": count, "metavar": "N", "help": "use only the first N rows"},
    "metrics": {"flags": ("--metrics", "--metric"), "metavar": "NAME=WEIGHT,…", "help": METRICS},
    "option": {"action": "append", "default": [], "dest": "options", "metavar": "KEY=VALUE", "help": OPTION},
    "goals_file": {"flags": ("--file",), "metavar": "SOURCE", "help": SOURCE},
    "max_messages": {"type": count, "metavar": "N", "help": LONGEST},
    "host": {"default": "127.0.0.1", "help": "address to listen on; any address but loopback requires a key"},
    "port": {"type": port, "help": "port to listen on"},
}
"""Options by name; the flag is the name with dashes unless `flags` says otherwise."""
JOB = ("at_once", "max_calls", "max_dollars", "call_seconds", "quiet")
"""What `offline/job.py` takes."""
MODELS = ("policy", "user", "judge")
INTERRUPTED = 130
"""Exit code of a verb that Ctrl-C ended."""


def add_options(parser: argparse.ArgumentParser, *names: str, **changes: dict[str, Any]) -> None:
    """Add shared options and settings of the reward; `changes` override the definition of single options."""
    kinds = get_type_hints(RewardOptions, include_extras=True)
    for name in names:
        option = dict(SHARED[name] if name in SHARED else _of_setting(name, *get_args(kinds[name])))
        option |= changes.get(name, {})
        flags = option.pop("flags", (f"--{name.replace('_', '-')}",))
        default = option.get("default")
        if default not in (None, "", []) and "(default" not in option["help"]:
            option["help"] += f" (default {default:g})" if isinstance(default, float) else f" (default {default})"
        parser.add_argument(*flags, **option)


def _of_setting(name: str, kind: Any, setting: Setting) -> dict[str, Any]:
    option: dict[str, Any] = {"default": setting.default, "help": setting.help}
    if kind in (int, float):
        option["type"] = count if setting.least == 1 else kind
    if setting.choices:
        option["choices"] = setting.choices
    if name in MODELS:
        option |= {"metavar": "MODEL", "help": f"{setting.help}: URL#name, provider/model, folder"}
    return option
