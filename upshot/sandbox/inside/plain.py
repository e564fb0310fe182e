"""Plain data across the wall: values as JSON with tags, so that nothing but data comes out of an untrusted process.

A list is a JSON list, scalars are themselves, everything else is an object with one key, its tag. Subclasses are
read through their base class's own methods, so an object that claims to equal everything arrives as what it holds.
Anything that is not data becomes opaque.
"""

from __future__ import annotations

import base64
import math
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_DEPTH = 200
BIG_INT = 1 << 63


class TooDeep(ValueError):
    """A value nested deeper than can be carried."""


def encode(value: Any, opaque: Callable[[Any], Any] | None = None, depth: int = 0) -> Any:
    """The JSON form of a value; `opaque` says what stands for an object that is not data."""
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int:
        return value if -BIG_INT < value < BIG_INT else {"i": hex(value)}
    if depth > MAX_DEPTH:
        raise TooDeep(f"a value nested deeper than {MAX_DEPTH} levels")
    for base, encoder in _ENCODERS:
        if issubclass(kind, base):
            return encoder(value, opaque, depth + 1)
    module = kind.__module__
    if module == "numpy":
        return _encode_numpy(value, opaque, depth + 1)
    return opaque(value) if opaque else {"o": [0, str(type.__getattribute__(kind, "__name__"))[:100]]}


def _items(base: type) -> Callable[[Any, Any, int], list[Any]]:
    iterate = base.__iter__  # type: ignore[attr-defined]
    return lambda value, opaque, depth: [encode(item, opaque, depth) for item in iterate(value)]


def _tagged(tag: str, base: type) -> Callable[[Any, Any, int], Any]:
    items = _items(base)
    return lambda value, opaque, depth: {tag: items(value, opaque, depth)}


def _encode_dict(value: Any, opaque: Any, depth: int) -> Any:
    return {"d": [[encode(k, opaque, depth), encode(v, opaque, depth)] for k, v in dict.items(value)]}


def _encode_text(value: Any, *_: Any) -> str:
    return str.__add__("", value)


def _encode_int(value: Any, opaque: Any, depth: int) -> Any:
    return encode(int.__add__(value, 0), opaque, depth)


def _encode_float(value: Any, *_: Any) -> float:
    return float.__add__(value, 0.0)


def _encode_complex(value: Any, *_: Any) -> Any:
    plain = complex.__add__(value, 0j)
    return {"c": [plain.real, plain.imag]}


def _encode_bytes(value: Any, *_: Any) -> Any:
    tag = "B" if isinstance(value, bytearray) else "b"
    return {tag: base64.b64encode(memoryview(value)).decode()}


def _encode_fraction(value: Any, opaque: Any, depth: int) -> Any:
    return {"F": [encode(int(value.numerator), opaque, depth), encode(int(value.denominator), opaque, depth)]}


def _encode_range(value: Any, opaque: Any, depth: int) -> Any:
    return {"r": [encode(part, opaque, depth) for part in (value.start, value.stop, value.step)]}


def _encode_time(value: Any, *_: Any) -> Any:
    if isinstance(value, timedelta):
        return {"T": ["timedelta", [value.days, value.seconds, value.microseconds]]}
    base = next(base for base in (datetime, date, time) if isinstance(value, base))
    return {"T": [base.__name__, str(base.isoformat(value))]}


_ENCODERS: list[tuple[type, Callable[[Any, Any, int], Any]]] = [
    (list, _items(list)),
    (tuple, _tagged("t", tuple)),
    (dict, _encode_dict),
    (str, _encode_text),
    (int, _encode_int),
    (float, _encode_float),
    (set, _tagged("s", set)),
    (frozenset, _tagged("f", frozenset)),
    (bytes, _encode_bytes),
    (bytearray, _encode_bytes),
    (complex, _encode_complex),
    (deque, _tagged("q", deque)),
    (Decimal, lambda value, *_: {"D": Decimal.__str__(value)}),
    (Fraction, _encode_fraction),
    (range, _encode_range),
    (datetime, _encode_time),
    (date, _encode_time),
    (time, _encode_time),
    (timedelta, _encode_time),
]


def _encode_numpy(value: Any, opaque: Any, depth: int) -> Any:
    import numpy as np

    if isinstance(value, np.generic) and value.dtype.kind in "biufcSU":
        return {"n": [value.dtype.str, encode(value.item(), opaque, depth)]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        flat = encode(np.ndarray.tolist(np.ndarray.ravel(value)), opaque, depth)
        return {"a": [value.dtype.str, list(value.shape), flat]}
    return opaque(value) if opaque else {"o": [0, type(value).__name__]}


class Opaque:
    """Something that was not data; equal to nothing."""

    def __init__(self, handle: int, kind: str) -> None:
        self.handle = handle
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind} object>"


def decode(data: Any, opaque: Callable[[int, str], Any] = Opaque) -> Any:
    """The value behind a JSON form; raises ValueError, TypeError or KeyError on anything malformed."""
    if isinstance(data, list):
        return [decode(item, opaque) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("malformed value: an object must have one tag")
    ((tag, body),) = data.items()
    if tag == "o":
        return opaque(int(body[0]), str(body[1]))
    return _DECODERS[tag](body, opaque)


def _decode_dict(body: Any, opaque: Any) -> dict[Any, Any]:
    return {decode(key, opaque): decode(value, opaque) for key, value in body}


def _decode_time(body: Any, _: Any) -> Any:
    name, text = body
    if name == "timedelta":
        return timedelta(*text)
    kinds: dict[str, Any] = {"datetime": datetime, "date": date, "time": time}
    return kinds[name].fromisoformat(text)


def _decode_scalar(body: Any, opaque: Any) -> Any:
    import numpy as np

    dtype, value = body
    return np.dtype(dtype).type(decode(value, opaque))


def _decode_array(body: Any, opaque: Any) -> Any:
    import numpy as np

    dtype, shape, flat = body
    if math.prod(shape) != len(flat):
        raise ValueError("malformed array")
    return np.array([decode(item, opaque) for item in flat], dtype=np.dtype(dtype)).reshape(shape)


_DECODERS: dict[str, Callable[[Any, Any], Any]] = {
    "i": lambda body, _: int(body, 16),
    "t": lambda body, opaque: tuple(decode(item, opaque) for item in body),
    "s": lambda body, opaque: {decode(item, opaque) for item in body},
    "f": lambda body, opaque: frozenset(decode(item, opaque) for item in body),
    "q": lambda body, opaque: deque(decode(item, opaque) for item in body),
    "d": _decode_dict,
    "b": lambda body, _: base64.b64decode(body),
    "B": lambda body, _: bytearray(base64.b64decode(body)),
    "c": lambda body, _: complex(*body),
    "D": lambda body, _: Decimal(body),
    "F": lambda body, opaque: Fraction(decode(body[0], opaque), decode(body[1], opaque)),
    "r": lambda body, opaque: range(*(decode(item, opaque) for item in body)),
    "T": _decode_time,
    "n": _decode_scalar,
    "a": _decode_array,
}
