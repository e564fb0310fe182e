"""Reads settings from a config (YAML, JSON) or a launch script (sh) of the originals. Nothing is run.

A script's own variables, and sums of them, are filled in; values that only the shell knows stay as written.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml

from upshot.config.layers import flatten
from upshot.config.load import read_yaml
from upshot.core.errors import UserError
from upshot.core.files import read_text

TALK = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"  # names the file of who speaks with the policy
MAP = "classmate_model_mapping.json"  # the name that a map of served classmates has among the settings
_VARIABLE = re.compile(r"\$(?=\w|\{\w+\})\{?(\w+)\}?")
_DEFAULT = re.compile(r"\$\{(\w+):-([^{}$]*)\}")
_SUM = re.compile(r"\$\(\((.*?)\)\)(?=[\s\"'/]|$)")
_WHOLE_NUMBERS = re.compile(r"(?:[\s\d+()-]|(?<!\*)\*(?!\*)|(?<!/)/(?!/))+")
_ESCAPED = re.compile(r"\$'((?:[^'\\]|\\.)*)'")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_LAUNCHER = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|uv)")
RANKS = ("--nproc_per_node", "--num_processes", "--num_nodes")  # flags of launchers that multiply the batch
_MODULE, _FILE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+"), re.compile(r"[\w./-]*\.py")
_OVERRIDE = re.compile(r"[\w.+]+=")


class OriginalSettings(NamedTuple):
    """The module or script that is launched ('' in a config), and its settings: flags, or dotted keys."""

    program: str
    settings: dict[str, Any]


def read_all(words: Sequence[str], is_known: Callable[[str], object]) -> OriginalSettings:
    """The settings of `KEY=VALUE` words, a script and the configs it names; earlier ones override later ones."""
    overrides = OriginalSettings("", dict(_settings([word for word in words if _OVERRIDE.match(word)])))
    paths = [word for word in words if not _OVERRIDE.match(word)]
    files = [overrides, *(read(path, is_known) for path in paths)]
    flags = {key: value for file in reversed(files) for key, value in file.settings.items() if key.startswith("--conf")}
    config = find_config(paths, flags)
    talk = next((PurePath(str(file.settings[TALK])) for file in files if TALK in file.settings), PurePath())
    user = find_config(paths, {"--config-name": talk.name, "--config-path": str(talk.parent)})
    # Its settings are read, so nothing is missing.
    files += [read_config(str(file)) for file in (config, user) if file is not None and str(file) not in paths]
    settings = {key: value for file in reversed(files) for key, value in file.settings.items()}
    settings = {key: value for key, value in settings.items() if config is None or key not in flags}
    return OriginalSettings(next((file.program for file in files if file.program), ""), settings)


def find_config(paths: Sequence[str], flags: Mapping[str, Any]) -> Path | None:
    """The YAML of `--config-name`: one of the files, or one in the folder of the script or of `--config-path`.

    Of an interaction it is the name and folder of its file.
    """
    if not paths or "--config-name" not in flags:
        return None
    name = str(flags["--config-name"]).removesuffix(".yaml") + ".yaml"
    where = str(flags.get("--config-path") or flags.get("--config-dir") or "")
    folder = re.sub(r"^(.*\)|\$\w+|\$\{\w+\})?/+", "", where)  # $(pwd)/… begins at the root of their project
    script = Path(paths[0]).resolve()
    tops = script.parents if folder else ()
    places = [*map(Path, paths), script.parent / name, *(top / folder / name for top in tops)]
    return next((place for place in places if place.name == name and place.is_file()), None)


def read(path: str, is_known: Callable[[str], object]) -> OriginalSettings:
    """The settings of an original's file; of a script, those of the first known program in it."""
    if not path.endswith(".sh"):
        return read_config(path)
    launched = list(read_script(read_text(Path(path))))
    if known := [script for script in launched if is_known(script.program)]:
        return known[0]
    what = f"'{launched[0].program}', which has no counterpart here" if launched else "nothing that is known"
    if inner := re.search(r"^\s*(?:ba)?sh (\S+\.sh)", read_text(Path(path)), re.MULTILINE):
        what = f"'{inner[1]}'; import that script instead. It launches nothing itself"
    raise UserError(f"'{path}' launches {what}; docs/migrate.md lists the scripts that have one")


def read_config(path: str) -> OriginalSettings:
    """A Hydra config, a map of classmates, or the flat file of arguments that CollabLLM's scripts take."""
    loaded = read_yaml(Path(path), "config")
    if not isinstance(loaded, dict):
        raise UserError(f"'{path}' is neither a .sh file nor a mapping of settings (.yaml, .json)")
    if loaded and all(isinstance(entry, dict) and "port" in entry for entry in loaded.values()):
        return OriginalSettings("", {MAP: path})
    flat = dict(flatten({k: v for k, v in loaded.items() if k not in ("hydra", "defaults")}))
    nested = any("." in key for key in flat)
    return OriginalSettings("", {key if nested else f"--{key}": value for key, value in flat.items()})


def read_script(text: str) -> Iterator[OriginalSettings]:
    """Every Python program that a shell script launches, with its settings."""
    variables: dict[str, str] = {}
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in code.replace("\\\n", " ").splitlines():
        line = _DEFAULT.sub(lambda match: variables.get(match[1], match[2]), line)
        line = _SUM.sub(lambda match: _sum(match, variables), line)
        line = _ESCAPED.sub(lambda match: shlex.quote(match[1].encode().decode("unicode_escape")), line)
        try:
            words = [_VARIABLE.sub(lambda m: variables.get(m[1], m[0]), w) for w in shlex.split(line, comments=True)]
        except ValueError:  # a quote over several lines: not a launched program
            continue
        named = _ASSIGNMENT.fullmatch(words[-1]) if words and words[:-1] in ([], ["export"]) else None
        if named is not None:
            variables[named[1]] = named[2]
            continue
        # Words before a lone `--` are for the scheduler that finds a machine for the program.
        behind = max((i for i, word in enumerate(words) if word == "--"), default=-1)
        by = next((i for i, word in enumerate(words) if i > behind and _LAUNCHER.fullmatch(word)), len(words))
        if "serve" in words[1:] and words[(serve := words.index("serve")) - 1].endswith("vllm"):
            yield OriginalSettings("vllm serve", {"model": words[serve + 1], **dict(_settings(words[serve + 2 :]))})
            continue
        start = next((i for i in range(by + 1, len(words)) if _is_program(words[i], words[i - 1])), None)
        if start is not None:
            ranks = {key: value for key, value in _settings(words[:start]) if key in RANKS}
            yield OriginalSettings(words[start], dict(_settings(words[start + 1 :])) | ranks)


def _is_program(word: str, before: str) -> bool:
    """Whether a launcher starts this word: a file, or the module of `-m`; not the file of one of its own flags."""
    return _FILE.fullmatch(word) is not None or (before == "-m" and _MODULE.fullmatch(word) is not None)


def _sum(whole: re.Match[str], variables: Mapping[str, str]) -> str:
    """The result of the arithmetic between `$((` and `))`, if it is a sum of whole numbers."""
    numbers = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: variables.get(name[1], name[0]), whole[1]).strip()
    with contextlib.suppress(SyntaxError, TypeError, ZeroDivisionError):
        # Only digits, brackets and + - * / get here, so evaluating them can do nothing but arithmetic.
        return str(eval(numbers.replace("/", "//"))) if _WHOLE_NUMBERS.fullmatch(numbers) else whole[0]
    return whole[0]


def _settings(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Flags with their values, and Hydra's overrides."""
    left = list(words)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if not name.startswith("--"):
            if equals:
                yield name.lstrip("+~"), _read(value)
            continue
        texts = [value] if equals else []
        while not equals and left and not left[0].startswith("--") and not _OVERRIDE.match(left[0]):
            texts.append(left.pop(0))
        values = [_read(text) for text in texts]
        yield name, True if not values else values[0] if len(values) == 1 else values


def _read(text: str) -> Any:
    """A value as YAML reads it, with 1e-6 as a number; text that is not YAML, or is quoted for Hydra, stays text."""
    try:
        value = text[1:-1] if text[:1] == text[-1:] == "'" else yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value
