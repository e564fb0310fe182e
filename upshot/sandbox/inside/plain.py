"""Plain data across the wall: values as JSON with tags, so that only data comes out of an untrusted process.

A list is a JSON list; None, truth values, numbers and texts are themselves. Everything else is an object with one key,
its tag, and a list of its parts. An object of a subclass of a data type is encoded as its data: its own `==` is never
called. An iterator is its items. Everything else is `foreign`: the caller of encode or decode says what replaces it.

`decode` runs in the judge and in the program, never in the supervisor. Foreign runners get the text of this file to
answer calls (`answer_calls`), so it imports nothing of this package.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, ItemsView, KeysView, ValuesView
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from time import perf_counter
from types import MappingProxyType
from typing import Any

MAX_DEPTH = 200
MOST_ITEMS = 10_000
"""The most items of an iterator: a longer one cannot be carried."""
BIG_INT = 1 << 63
OBJECT, ITERATOR, SUBCLASS, ARRAY, SCALAR = "o", "g", "u", "a", "n"
_HALVES = re.compile("[\ud800-\udfff]")
_DTYPE = re.compile(r"[<>|=][biufcSU]\d{1,5}")


def _moment(kind: Any) -> tuple[type, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]:
    return kind, lambda value: [kind.isoformat(value)], lambda parts: kind.fromisoformat(*parts)


# By tag: a type, the parts of a value, and the value that has these parts. No code of the program runs in between.
FORMS: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = {
    "t": (tuple, list, tuple),
    "d": (dict, lambda value: [list(pair) for pair in value.items()], dict),
    "s": (set, list, set),
    "f": (frozenset, list, frozenset),
    "q": (deque, list, deque),
    "b": (bytes, list, bytes),
    "B": (bytearray, list, bytearray),
    "i": (int, lambda value: [hex(value)], lambda parts: int(parts[0], 16)),
    "S": (str, lambda value: [*map(ord, value)], lambda parts: "".join(map(chr, parts))),
    "c": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "D": (Decimal, lambda value: [str(value)], lambda parts: Decimal(*parts)),
    "F": (Fraction, lambda value: [value.numerator, value.denominator], lambda parts: Fraction(*parts)),
    "r": (range, lambda value: [value.start, value.stop, value.step] if value else [], lambda p: range(*(p or [0]))),
    "T": _moment(datetime),
    "Td": _moment(date),
    "Tt": _moment(time),
    "T+": (timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda parts: timedelta(*parts)),
}
_TAGS = {form[0]: tag for tag, form in FORMS.items()}
BASES: dict[type, Callable[[Any], Any]] = {
    int: lambda value: int.__add__(value, 0),
    float: lambda value: float.__add__(value, 0.0),
    str: lambda value: "".join(str.__iter__(value)),
    list: lambda value: [*list.__iter__(value)],
    tuple: lambda value: (*tuple.__iter__(value),),
    dict: lambda value: {key: dict.__getitem__(value, key) for key in dict.__iter__(value)},
    set: lambda value: {*set.__iter__(value)},
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    UserList: lambda value: [*value],
    **dict.fromkeys((UserDict, ChainMap, MappingProxyType), lambda value: {**value}),
}
"""The plain data in an object of a subclass, or of a class that compares as such data."""


class Unreadable(BaseException):
    """A value that cannot be carried: not an exception of the program, and not one that a test may expect."""


def name_object(value: Any) -> dict[str, Any]:
    """What replaces an object that cannot be called: the name of its class."""
    return {OBJECT: [0, str(type.__getattribute__(type(value), "__name__"))[:100]]}


def encode(value: Any, foreign: Callable[[Any], Any] = name_object, depth: int = 0) -> Any:
    """The JSON form of a value; `foreign` returns the replacement for an object that is not data."""
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return value
    if (kind is int and -BIG_INT < value < BIG_INT) or (kind is str and (value.isascii() or not _HALVES.search(value))):
        return value  # JSON would join the halves of a surrogate pair
    if depth > MAX_DEPTH:
        raise Unreadable(f"a value nested deeper than {MAX_DEPTH} levels")

    def inner(parts: Any) -> list[Any]:
        return [encode(part, foreign, depth + 1) for part in parts]

    if kind is list:
        return inner(value)
    if kind in _TAGS and getattr(value, "maxlen", None) is None:  # the copy of a bounded deque would not forget
        tag = _TAGS[kind]
        return {tag: inner(FORMS[tag][1](value))}
    if kind.__module__ == "numpy" and (parts := _split_numpy(value)) is not None:
        return {SCALAR if len(parts) == 2 else ARRAY: inner(parts)}
    base = next((base for base in BASES if issubclass(kind, base)), None)
    if base is not None:
        return {SUBCLASS: inner([BASES[base](value)])}
    iterates = hasattr(kind, "__next__") or issubclass(kind, KeysView | ValuesView | ItemsView)
    if kind.__module__ in ("builtins", "itertools") and iterates:
        items = [*itertools.islice(value, MOST_ITEMS + 1)]
        if len(items) > MOST_ITEMS:
            raise Unreadable(f"an iterator of more than {MOST_ITEMS} items")
        return {ITERATOR: inner(items)}
    return foreign(value)


def _split_numpy(value: Any) -> list[Any] | None:
    """The parts of a numpy number or array: its type, the shape of an array, its content."""
    import numpy as np

    if not isinstance(value, np.generic | np.ndarray) or value.dtype.kind not in "biufcSU":
        return None
    if isinstance(value, np.generic) or not value.shape:
        return [value.dtype.str, value.item()]
    return [value.dtype.str, list(value.shape), np.ndarray.tolist(np.ndarray.ravel(value))]


def sort(data: Any) -> Any:
    """The same JSON form with sets and dictionaries in one order, so that equal ones look equal."""
    if isinstance(data, list):
        return [sort(part) for part in data]
    if not isinstance(data, dict):
        return data
    ((tag, body),) = data.items()
    return {tag: sorted(sort(body), key=json.dumps) if tag in ("s", "f", "d") else sort(body)}


def answer_calls(
    load: Callable[[], dict[str, Any]],
    tests: list[tuple[str, list[str]]],
    put: Callable[[dict[str, Any]], None],
    describe: Callable[[BaseException], list[str]],
) -> None:
    """Load the program, evaluate the calls of each test after its imports, and `put` a line for each test.

    The expected values are not in this process.
    """
    started = perf_counter()
    try:
        namespace = load()
    except BaseException as error:
        put({"load": describe(error), "t": perf_counter() - started})
        return
    for imports, calls in tests:
        started = perf_counter()
        try:
            if imports:
                exec(imports, namespace)
            values = [eval(call, namespace) for call in calls]
        except BaseException as error:
            put({"e": describe(error), "t": perf_counter() - started})
            continue
        try:
            put({"v": [sort(encode(value)) for value in values], "t": perf_counter() - started})
        except BaseException as error:  # the call did not fail, but its value cannot be carried
            put({"u": describe(error)[0], "t": perf_counter() - started})


def decode(data: Any, foreign: Callable[[str, list[Any]], Any], depth: int = 0) -> Any:
    """The value of a JSON form; `foreign` makes the replacement for an object or an iterator of the other process.

    Raises some exception if anything is malformed.
    """
    if depth > 2 * MAX_DEPTH:
        raise ValueError(f"a value nested deeper than {MAX_DEPTH} levels")
    if isinstance(data, str):
        return sys.intern(data)  # like a literal in the test: some programs test `word is "add"`
    if not isinstance(data, dict | list):
        return data
    if isinstance(data, list):
        return [decode(item, foreign, depth + 1) for item in data]
    ((tag, body),) = data.items()
    parts = [decode(part, foreign, depth + 1) for part in body]
    if tag in (OBJECT, ITERATOR):
        return foreign(tag, parts)
    if tag in (SCALAR, ARRAY):
        return _join_numpy(*parts)
    return parts[0] if tag == SUBCLASS else FORMS[tag][2](parts)


def _join_numpy(dtype: str, *parts: Any) -> Any:
    import numpy as np

    if not _DTYPE.fullmatch(dtype):
        raise ValueError("malformed dtype")
    if len(parts) == 1:
        return np.dtype(dtype).type(parts[0])
    shape, flat = parts
    if math.prod(shape) != len(flat):
        raise ValueError("malformed array")
    return np.array(flat, dtype=np.dtype(dtype)).reshape(shape)
