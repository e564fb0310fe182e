"""Settings out of a config (YAML, JSON) or a launch script (sh) of the originals. Nothing is run.

A script's own variables, and sums of them, are filled in; what the shell alone could know stays as it is written.
"""

from __future__ import annotations

import ast
import contextlib
import operator
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from upshot.config.layers import flatten
from upshot.core.errors import UserError
from upshot.core.files import read_text

_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_SUM = re.compile(r"\$\(\((.*?)\)\)(?=[\s\"'/]|$)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_LAUNCH = re.compile(r"(?:verl\.trainer|verl/trainer|scripts[./](?:train|engine))[\w./]*|[\w./-]*\.py")
_OVERRIDE = re.compile(r"[\w.+]+=")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_OPERATORS |= {ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv}


@dataclass
class OriginalSettings:
    """What a file of theirs sets."""

    program: str = ""
    """The module or script that is launched; '' in a config."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Flags with their dashes, or dotted keys."""

    @property
    def original(self) -> str:
        """Which of the originals they belong to."""
        if any("classmate" in key for key in self.settings) or "classmate" in self.program:
            return "classmate"
        return "verl" if any("." in key for key in self.settings) else "collabllm"


def read_all(paths: Sequence[str]) -> OriginalSettings:
    """The settings of a script and the configs it names; what an earlier file sets stands."""
    files = [read(path) for path in paths]
    settings = {key: value for file in reversed(files) for key, value in file.settings.items()}
    return OriginalSettings(next((file.program for file in files if file.program), ""), settings)


def read(path: str) -> OriginalSettings:
    """The settings of a file of theirs."""
    text, kind = read_text(Path(path)), Path(path).suffix
    if kind == ".sh":
        script = read_script(text)
        if not script.settings:
            raise UserError(f"'{path}' launches nothing that is known: no verl.trainer, no scripts.train")
        return script
    if kind in (".yaml", ".yml", ".json"):
        return read_config(text, path)
    raise UserError(f"'{path}' is no .sh, .yaml or .json file")


def read_config(text: str, path: str = "config") -> OriginalSettings:
    """A Hydra config, or the flat file of arguments that CollabLLM's scripts take."""
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"'{path}' is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"'{path}' is no mapping of settings")
    flat = dict(flatten({k: v for k, v in loaded.items() if k not in ("hydra", "defaults")}))
    nested = any("." in key for key in flat)
    return OriginalSettings(settings={key if nested else f"--{key}": value for key, value in flat.items()})


def read_script(text: str) -> OriginalSettings:
    """The first launch of a training in a shell script."""
    variables: dict[str, str] = {}
    told = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in told.replace("\\\n", " ").splitlines():
        line = _SUM.sub(lambda match: _sum(match[0], match[1], variables), line)
        try:
            words = [_fill(word, variables) for word in shlex.split(line, comments=True)]
        except ValueError:  # a quote that goes on over several lines: nothing that is launched
            continue
        named = _ASSIGNMENT.fullmatch(words[-1]) if words and words[:-1] in ([], ["export"]) else None
        if named is not None:
            variables[named[1]] = named[2]
            continue
        start = next((i for i, word in enumerate(words) if _LAUNCH.fullmatch(word)), None)
        if start is not None and any("python" in word or "torchrun" in word for word in words[:start]):
            settings = dict(_settings(words[start + 1 :]))
            if settings:  # of the launcher's own flags the one that a batch is counted by
                settings |= {key: value for key, value in _settings(words[:start]) if key == "--nproc_per_node"}
                return OriginalSettings(words[start], settings)
    return OriginalSettings()


def _fill(text: str, variables: Mapping[str, str]) -> str:
    """A text with the script's own variables filled in."""
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[0]), text)


def _sum(whole: str, inner: str, variables: Mapping[str, str]) -> str:
    """What is between `$((` and `))` worked out, where it is a sum of whole numbers."""
    numbers = re.sub(r"[A-Za-z_]\w*", lambda match: variables.get(match[0], match[0]), _fill(inner, variables))
    with contextlib.suppress(SyntaxError, ValueError, ZeroDivisionError):
        return str(_value(ast.parse(numbers.strip(), mode="eval").body))
    return whole


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("no sum of whole numbers")


def _settings(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Flags with their values, and Hydra's overrides."""
    left = list(words)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if not name.startswith("--"):
            if equals:
                yield name.lstrip("+~"), _read(value)
            continue
        given = [value] if equals else []
        while not equals and left and not left[0].startswith("--") and not _OVERRIDE.match(left[0]):
            given.append(left.pop(0))
        values = [_read(text) for text in given]
        yield name, True if not values else values[0] if len(values) == 1 else values


def _read(text: str) -> Any:
    """A value as YAML reads it, and 1e-6 as a number; what is no YAML stays text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value
