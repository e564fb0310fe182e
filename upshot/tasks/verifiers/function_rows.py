"""Rows that call a function: `fn_name` of APPS and TACO, 'functional' of LiveCodeBench.

A call becomes an assert that the sandbox runs. Its values have been through JSON, so that a result is compared with
what JSON makes of it, and decimal fractions as those of stdin/stdout rows are: to a millionth.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from upshot.tasks.verifiers.base import decode_json
from upshot.tasks.verifiers.programs import free_names, list_defined, parse

_AGREES = """
import itertools as _itertools, math as _math
def _agrees_with(mine, *ways, _list=[].__class__, _tuple=().__class__, _dict={}.__class__, _float=1.0.__class__):
    for wanted in ways:
        if isinstance(mine, (_list, _tuple)):
            same = isinstance(wanted, _list) and mine.__len__() == wanted.__len__()
            same = same and False not in _itertools.starmap(_agrees_with, _itertools.zip_longest(mine, wanted))
        elif isinstance(mine, _dict):
            named = {f"{key}": value for key, value in mine.items()}
            same = isinstance(wanted, _dict) and mine.__len__() == wanted.__len__() and named.keys() == wanted.keys()
            same = same and False not in [_agrees_with(named[key], wanted[key]) for key in wanted]
        elif isinstance(wanted, _float) and isinstance(mine, (_float, (1).__class__)):
            same = _math.isclose(mine, wanted, rel_tol=1e-6, abs_tol=1e-6) or (mine != mine and wanted != wanted)
        else:
            same = mine == wanted
        if same:
            return True
    return False
"""
"""JSON has no tuples and names its keys by text. Programs may have a global `dict` or `max`: no such name is used."""
_MODULES = (
    *("collections", "math", "itertools", "functools", "heapq", "bisect", "typing", "string", "random", "re"),
    *("operator", "copy", "datetime", "statistics", "fractions", "json", "io", "sys", "time"),
)
"""Of which the graders of these sets import everything before a program; a name is the first one's that has it."""


@dataclass(frozen=True)
class FunctionCall:
    """A test of a function-style row: arguments and result."""

    function: str
    arguments: list[Any]
    expected: Any

    def as_assert(self, program: str) -> str:
        """The test as text. A whole number, a text or a truth value is compared as it is, all else part by part."""
        call = f"{_find_owner(program, self.function)}{self.function}({', '.join(map(_write, self.arguments))})"
        ways = self._list_ways()
        if len(ways) == 1 and not isinstance(self.expected, float | list | dict):
            return f"assert {call} == {self.expected!r}"
        return f"{_AGREES}\nassert _agrees_with({call}, {', '.join(map(_write, ways))})"

    def _list_ways(self) -> list[Any]:
        """What the result may be: these sets often put a lone one into a list, or into a text as JSON."""
        ways = [self.expected]
        if (decoded := decode_json(self.expected)) is not self.expected:
            ways.append(decoded)
        return ways + [way[0] for way in ways if isinstance(way, list) and len(way) == 1]


def _find_owner(program: str, function: str) -> str:
    """`Solution().` where the function is a method of that class and there is none of the name beside it."""
    if not re.search(r"^class Solution\b", program, re.MULTILINE):
        return ""
    tree = parse(program)
    beside = [node for node in tree.body if not isinstance(node, ast.ClassDef)] if tree else []
    return "" if function in list_defined(ast.Module(beside, [])) else "Solution()."


def _write(value: Any) -> str:
    """A value of JSON as Python; NaN and the infinities have no literal."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_write, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{str(key)!r}: {_write(item)}' for key, item in value.items())}}}"
    return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def with_imports(program: str) -> str:
    """The program behind imports of what it uses without one, as the graders of these sets provide it."""
    tree = parse(program) if "__future__" not in program else None
    lines = [_import(name) for name in sorted(free_names(tree))] if tree else []
    return "; ".join(filter(None, lines)) + "\n" + program if any(lines) else program


def _import(name: str) -> str:
    if name in _MODULES:
        return f"import {name}"
    homes = (module for module in _MODULES if hasattr(importlib.import_module(module), name))
    home = "" if name.startswith("_") else next(homes, "")
    return f"from {home} import {name}" if home else ""


def function_calls(value: Any, row: Mapping[str, Any]) -> list[FunctionCall]:
    """The calls of a row that names a function; none where its tests are for stdin and stdout."""
    if isinstance(value, Mapping) and value.get("fn_name"):
        pairs = zip(map(decode_json, value.get("inputs") or ()), value.get("outputs") or (), strict=False)
        listed = [(list(one) if isinstance(one, list | tuple) else [one], wanted) for one, wanted in pairs]
        return [FunctionCall(str(value["fn_name"]), arguments, wanted) for arguments, wanted in listed]
    cases = value if isinstance(value, list) else []
    metadata = decode_json(row.get("metadata"))
    named = metadata.get("func_name") if isinstance(metadata, Mapping) else ""
    name = str(row.get("func_name") or row.get("fn_name") or named or "")
    if not name or not all(isinstance(case, Mapping) and case.get("testtype") == "functional" for case in cases):
        return []
    return [
        FunctionCall(name, [_read_json(line) for line in str(case["input"]).splitlines()], _read_json(case["output"]))
        for case in cases
    ]


def _read_json(text: Any) -> Any:
    with suppress(TypeError, ValueError):
        return json.loads(text)
    return text
