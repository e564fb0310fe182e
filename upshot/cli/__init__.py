"""The command line: `upshot VERB`. One file per verb; heavy imports happen inside the verbs."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from upshot.cli.options import INTERRUPTED, describe, subparsers
from upshot.config.trust import trusting_only
from upshot.core.errors import did_you_mean, user_error_in
from upshot.core.files import expand_home
from upshot.core.threads import settle_threads
from upshot.core.version import __version__

VERBS = (
    "demo", "train", "rollout", "chat", "new", "recipe", "eval", "sweep", "reproduce", "export", "view", "runs",
    "replay", "data", "logs", "score", "verify", "sandbox", "serve", "pool", "completion",
)  # fmt: skip
FOLDERS = {
    **dict.fromkeys(("replay", "data", "logs", "score", "verify"), "files"),
    **dict.fromkeys(("sandbox", "serve", "pool"), "machines"),
}
"""Verbs whose file is in a folder below this one."""
RUN_CODE = ("demo", "train", "sweep")
"""Verbs that run code that comes with a recipe, except with --dry-run; the others require --trust."""
WITHOUT_CODE = ("demo", "new", "completion", "sandbox", "serve")
"""Verbs that never run such code."""
_LINE = re.compile(
    r"""\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*
    (?:"(?P<double>(?:\\.|[^"\\])*)"|'(?P<single>[^']*)'|(?P<bare>.*?))\s*(?:\#.*)?""",
    re.VERBOSE,
)
"""A line of a `.env` file: `export`, quotes and comments as a shell has them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; an error that the user can fix is one line on stderr, with exit code 2."""
    settle_threads()
    words = [expand_home(word) for word in (sys.argv[1:] if argv is None else argv)]  # a quoted `~` as well
    load_environment()
    if words[:1] == ["eval"] and words[1:2] in (["judge"], ["monitor"], ["user"]):  # verbs of their own
        from upshot.cli.eval import inner_parser

        inner = inner_parser(words[1])
        add_trust(inner)
        args = inner.parse_args(words[2:])
    else:
        args = _parse(words)
    trusted = getattr(args, "trust", False) or (words[0] in RUN_CODE and not getattr(args, "dry_run", False))
    try:
        with trusting_only(None if trusted else words):
            return int(args.run(args))
    except KeyboardInterrupt:
        print("upshot: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        return 0
    except (PermissionError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        if error.filename is None:
            raise
        print(f"upshot: '{error.filename}': {(error.strerror or type(error).__name__).lower()}", file=sys.stderr)
        return 2
    except (Exception, BaseExceptionGroup) as error:
        known = user_error_in(error)
        if known is None:
            raise
        print(f"upshot: {' '.join(str(known).split())}", file=sys.stderr)
        print("".join(f"    {line}\n" for line in known.excerpt.splitlines()), end="", file=sys.stderr)
        return 2


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments; overrides may also follow flags (`train RECIPE --json train.steps=1`)."""
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        print(f"upshot: unknown verb '{words[0]}'; {did_you_mean(words[0], VERBS)}", file=sys.stderr)
        raise SystemExit(2)
    parser = make_parser(words[:1])
    args, rest = parser.parse_known_args(words)
    if rest:
        parser = subparsers(parser).get(words[0], parser)  # its usage is the one to show
        if hasattr(args, "overrides") and (key := re.fullmatch(r"--(\w+(\.\w+)+)(=.*)?", rest[0])):
            value = key[3] or "=" + next(iter(rest[1:]), "VALUE")
            parser.error(f"{rest[0]}: keys of a recipe have no dashes; write {key[1]}{value}")
        if not hasattr(args, "overrides") or any(word.startswith("-") for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        args.overrides = [*args.overrides, *rest]
    return args


def make_parser(asked: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser with the options of the requested verb, or with all verbs if the words name none."""
    parser = argparse.ArgumentParser(
        prog="upshot",
        description="Train language models on what comes of their words.",
        epilog="Start with `upshot demo`. `upshot VERB --help` describes a verb.",
    )
    parser.add_argument("--version", action="version", version=f"upshot {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    wanted = [verb for verb in VERBS if asked and asked[0] == verb]
    for verb in wanted or VERBS:
        module = module_of(verb)
        verb_parser = verbs.add_parser(verb, **describe(module.__doc__))
        verb_parser.set_defaults(run=getattr(module, "run", None))
        module.add_arguments(verb_parser)
        if verb not in WITHOUT_CODE:
            add_trust(verb_parser)
    return parser


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add --trust to a verb, or to each of its parts: run the code that comes with a recipe, run folder or file."""
    parts = subparsers(parser)
    for part in parts.values():
        add_trust(part)
    if not parts:
        parser.add_argument("--trust", action="store_true", help="run code that comes with a recipe or run folder")


def module_of(verb: str) -> Any:
    """The module of a verb."""
    return importlib.import_module(".".join(filter(None, ("upshot.cli", FOLDERS.get(verb), verb))))


def load_environment(folder: Path | None = None) -> None:
    """Set the variables of the folder's `.env` that are not set already: the shell wins."""
    file = (folder or Path.cwd()) / ".env"
    if file.is_file():
        for name, value in variables(file.read_text(encoding="utf-8", errors="replace")):
            os.environ.setdefault(name, value)


def variables(text: str) -> Iterator[tuple[str, str]]:
    """Names and values of the `NAME=value` lines of a `.env` file."""
    for match in filter(None, map(_LINE.fullmatch, text.splitlines())):
        name, double, single, bare = match.groups()
        if double is not None:
            yield name, re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), double)
        else:
            yield name, bare if single is None else single
