"""Comparing what a program returned with what was expected, without building anything hostile from it."""

from __future__ import annotations

from typing import Any

from upshot.sandbox.inside import plain
from upshot.sandbox.split import Check

MAX_KEY_PARTS = 500
_SCALARS = frozenset("icDFrTbB")
_CONTAINERS = frozenset("tsfqdbB")


def holds(check: Check, data: Any) -> bool:
    """Whether the returned data satisfies the check; raises on malformed data."""
    if check.relation == "eq":
        return matches(data, check.expected)
    if check.relation == "ne":
        return not matches(data, check.expected)
    if check.relation == "is":
        return data is check.expected
    return truth(data) is (check.relation == "truthy")


def truth(data: Any) -> bool:
    """The truth of returned data; an object that is not data is true, as objects are."""
    if isinstance(data, dict):
        ((tag, body),) = data.items()
        if tag == "o":
            return True
        if tag in _CONTAINERS:
            return bool(body)
        if tag == "a":
            return len(body[2]) == 1 and truth(body[2][0])
        if tag == "n":
            return truth(body[1])
        return bool(plain.decode(data))
    return bool(data)


def matches(data: Any, expected: Any) -> bool:
    """Whether JSON data stands for a value equal to the expected one.

    Sets and dictionaries are looked up in the expected value, never built from the data: keys chosen to collide would
    cost quadratic time.
    """
    if isinstance(data, list):
        if not isinstance(expected, list) or len(data) != len(expected):
            return False
        return all(matches(item, want) for item, want in zip(data, expected, strict=True))
    if not isinstance(data, dict):
        return _equal(data, expected)
    ((tag, body),) = data.items()
    if tag == "t":
        if not isinstance(expected, tuple) or len(body) != len(expected):
            return False
        return all(matches(item, want) for item, want in zip(body, expected, strict=True))
    if tag in ("s", "f"):
        return isinstance(expected, (set, frozenset)) and _same_keys(body, dict.fromkeys(expected)) is not None
    if tag == "d":
        return _same_dict(body, expected)
    if tag == "n":
        return matches(body[1], expected)
    if tag == "a":
        return len(body[2]) == 1 and matches(body[2], expected if isinstance(expected, list) else [expected])
    return tag in _SCALARS and _equal(plain.decode(data), expected)


def _equal(value: Any, expected: Any) -> bool:
    return bool(value == expected)


def _same_keys(keys: list[Any], expected: dict[Any, Any]) -> list[Any] | None:
    """The expected keys in the order of the data, None unless both hold the same ones."""
    if len(keys) != len(expected):
        return None
    own = {key: key for key in expected}
    found = []
    for item in keys:
        if isinstance(item, dict) and len(next(iter(item.values()), ())) > MAX_KEY_PARTS:
            return None
        key = plain.decode(item)
        if key.__hash__ is None or key not in own:
            return None
        found.append(own.pop(key))
    return found


def _same_dict(body: list[Any], expected: Any) -> bool:
    if not isinstance(expected, dict) or len(body) != len(expected):
        return False
    keys = _same_keys([key for key, _ in body], expected)
    return keys is not None and all(matches(pair[1], expected[key]) for key, pair in zip(keys, body, strict=True))
