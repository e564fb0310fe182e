"""Plain data across the wall: values as JSON with tags, so that nothing but data comes out of an untrusted process.

A list is a JSON list, scalars are themselves, everything else is an object with one key, its tag. Anything that is
not data becomes opaque. An object of a subclass of data is the data that it is made of: its own `==` is not asked.
`decode` runs in the judge and in the program, never in the supervisor. Foreign runners get this file's own text: it
imports nothing of this package.
"""

from __future__ import annotations

import base64
import functools
import keyword
import math
import re
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_DEPTH = 200
BIG_INT = 1 << 63
KEYS_VIEW: type = type({}.keys())
TYPES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)}
"""Types that cross by name: a function may return `int`."""
_RECORD = frozenset(vars(namedtuple("_RECORD", "x")))
_HALVES = re.compile("[\ud800-\udfff]")
_DTYPE = re.compile(r"[<>|=][biufcSU]\d{1,5}")


class TooDeep(ValueError):
    """A value nested deeper than can be carried."""


def encode(value: Any, opaque: Callable[[Any], Any] | None = None, depth: int = 0) -> Any:
    """The JSON form of a value; `opaque` says what stands for an object that is not data."""
    kind = type(value)
    if kind is str and not value.isascii() and _HALVES.search(value):
        return opaque(value) if opaque else {"o": [0, "str"]}  # JSON would put halves of a letter together
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int:
        return value if -BIG_INT < value < BIG_INT else {"i": hex(value)}
    if depth > MAX_DEPTH:
        raise TooDeep(f"a value nested deeper than {MAX_DEPTH} levels")
    for base, encoder in _ENCODERS:
        if kind is base or (base is tuple and issubclass(kind, tuple) and _is_record(kind)):
            return encoder(value, opaque, depth + 1)
    named = [name for name, known in TYPES.items() if known is value] if kind is type else []
    if named:
        return {"p": named[0]}
    if kind.__module__ == "numpy":
        return _encode_numpy(value, opaque, depth + 1)
    for base, inside in BASES:
        if issubclass(kind, base):
            return {"u": encode(inside(value), opaque, depth + 1)}
    return opaque(value) if opaque else {"o": [0, str(type.__getattribute__(kind, "__name__"))[:100]]}


def _is_record(kind: type) -> bool:
    """Whether a class is a namedtuple and nothing more: what it adds to a tuple is the same in every process."""
    own = vars(kind)
    added = [name for name, value in own.items() if isinstance(value, types.FunctionType | property)]
    return kind.__bases__ == (tuple,) and "_fields" in own and all(name in _RECORD for name in added)


def _items(value: Any, opaque: Any, depth: int) -> list[Any]:
    return [encode(item, opaque, depth) for item in value]


def _tag(tag: str) -> Callable[[Any, Any, int], Any]:
    return lambda value, opaque, depth: {tag: _items(value, opaque, depth)}


def _mapping(tag: str, base: Any = dict) -> Callable[[Any, Any, int], Any]:
    pairs = base.items  # an OrderedDict has an order of its own, which `dict.items` does not know (`move_to_end`)
    return lambda value, opaque, depth: {
        tag: [[encode(k, opaque, depth), encode(v, opaque, depth)] for k, v in pairs(value)]
    }


def _encode_tuple(value: Any, opaque: Any, depth: int) -> Any:
    items = _items(tuple.__iter__(value), opaque, depth)
    names = getattr(type(value), "_fields", None)
    if type(names) is tuple and len(names) == len(items) and all(type(name) is str for name in names):
        return {"N": [str(type(value).__name__), list(names), items]}
    return {"t": items}


def _encode_complex(value: Any, *_: Any) -> Any:
    plain = complex.__add__(value, 0j)
    return {"c": [plain.real, plain.imag]}


def _encode_bytes(value: Any, *_: Any) -> Any:
    tag = "B" if isinstance(value, bytearray) else "b"
    return {tag: base64.b64encode(memoryview(value)).decode()}


def _encode_fraction(value: Any, opaque: Any, depth: int) -> Any:
    return {"F": _items((int(value.numerator), int(value.denominator)), opaque, depth)}


def _encode_deque(value: Any, opaque: Any, depth: int) -> Any:
    if value.maxlen is not None and opaque is not None:
        return opaque(value)  # a copy would not forget its first items
    return {"q": _items(value, opaque, depth)}


def _bounds(tag: str) -> Callable[[Any, Any, int], Any]:
    return lambda value, opaque, depth: {tag: _items((value.start, value.stop, value.step), opaque, depth)}


def _encode_time(value: Any, *_: Any) -> Any:
    if isinstance(value, timedelta):
        return {"T": ["timedelta", [value.days, value.seconds, value.microseconds]]}
    base = next(base for base in (datetime, date, time) if isinstance(value, base))
    return {"T": [base.__name__, str(base.isoformat(value))]}


_ENCODERS: list[tuple[type, Callable[[Any, Any, int], Any]]] = [
    (list, _items),
    (tuple, _encode_tuple),
    (Counter, _mapping("C")),
    (OrderedDict, _mapping("M", OrderedDict)),
    (defaultdict, _mapping("E")),
    (dict, _mapping("d")),
    (set, _tag("s")),
    (frozenset, _tag("f")),
    (KEYS_VIEW, _tag("k")),
    (bytes, _encode_bytes),
    (bytearray, _encode_bytes),
    (complex, _encode_complex),
    (deque, _encode_deque),
    (Decimal, lambda value, *_: {"D": Decimal.__str__(value)}),
    (Fraction, _encode_fraction),
    (range, _bounds("r")),
    (slice, _bounds("S")),
    (datetime, _encode_time),
    (date, _encode_time),
    (time, _encode_time),
    (timedelta, _encode_time),
]


BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, lambda value: int.__add__(value, 0)),
    (float, lambda value: float.__add__(value, 0.0)),
    (str, lambda value: "".join(str.__iter__(value))),
    (list, lambda value: [*list.__iter__(value)]),
    (tuple, lambda value: (*tuple.__iter__(value),)),
    (dict, lambda value: {key: dict.__getitem__(value, key) for key in dict.__iter__(value)}),
    (set, lambda value: {*set.__iter__(value)}),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
)
"""The data that an object of a subclass is made of."""


def _encode_numpy(value: Any, opaque: Any, depth: int) -> Any:
    import numpy as np

    if isinstance(value, np.generic) and value.dtype.kind in "biufcSU":
        return {"n": [value.dtype.str, encode(value.item(), opaque, depth)]}
    if type(value) is np.ndarray and value.dtype.kind in "biufcSU":
        flat = encode(np.ndarray.tolist(np.ndarray.ravel(value)), opaque, depth)
        return {"a": [value.dtype.str, list(value.shape), flat]}
    return opaque(value) if opaque else {"o": [0, type(value).__name__]}


def decode(data: Any, opaque: Callable[[int, str], Any], depth: int = 0) -> Any:
    """The value behind a JSON form, opaque ones through `opaque`; raises some exception on anything malformed."""
    if depth > 2 * MAX_DEPTH:
        raise TooDeep(f"a value nested deeper than {MAX_DEPTH} levels")

    def inner(item: Any) -> Any:
        return decode(item, opaque, depth + 1)

    if isinstance(data, list):
        return [inner(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((tag, body),) = data.items()
    if tag == "o":
        return opaque(int(body[0]), str(body[1])[:100])
    return DECODERS[tag](body, inner)


def _decode_time(body: Any, _: Any) -> Any:
    name, text = body
    if name == "timedelta":
        return timedelta(*text)
    kinds: dict[str, Any] = {"datetime": datetime, "date": date, "time": time}
    return kinds[name].fromisoformat(text)


def _dtype(text: str) -> Any:
    import numpy as np

    if not _DTYPE.fullmatch(text):
        raise ValueError("malformed dtype")
    return np.dtype(text)


def _decode_array(body: Any, inner: Any) -> Any:
    import numpy as np

    dtype, shape, flat = body
    if math.prod(shape) != len(flat):
        raise ValueError("malformed array")
    return np.array([inner(item) for item in flat], dtype=_dtype(dtype)).reshape(shape)


@functools.lru_cache(maxsize=64)
def _tuple_class(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name if name.isidentifier() and not keyword.iskeyword(name) else "Record", fields, rename=True)


def _decode_fields(body: Any, inner: Any) -> Any:
    name, fields, items = body
    return _tuple_class(name, tuple(fields))(*map(inner, items))


def _pairs(body: Any, inner: Any) -> dict[Any, Any]:
    return {inner(key): inner(value) for key, value in body}


DECODERS: dict[str, Callable[[Any, Any], Any]] = {
    "i": lambda body, _: int(body, 16),
    "t": lambda body, inner: tuple(map(inner, body)),
    "N": _decode_fields,
    "s": lambda body, inner: set(map(inner, body)),
    "f": lambda body, inner: frozenset(map(inner, body)),
    "k": lambda body, inner: dict.fromkeys(map(inner, body)).keys(),
    "q": lambda body, inner: deque(map(inner, body)),
    "d": _pairs,
    "C": lambda body, inner: Counter(_pairs(body, inner)),
    "M": lambda body, inner: OrderedDict(_pairs(body, inner)),
    "E": lambda body, inner: defaultdict(None, _pairs(body, inner)),
    "b": lambda body, _: base64.b64decode(body),
    "B": lambda body, _: bytearray(base64.b64decode(body)),
    "c": lambda body, _: complex(*body),
    "D": lambda body, _: Decimal(body),
    "F": lambda body, inner: Fraction(inner(body[0]), inner(body[1])),
    "r": lambda body, inner: range(*map(inner, body)),
    "S": lambda body, inner: slice(*map(inner, body)),
    "T": _decode_time,
    "u": lambda body, inner: inner(body),
    "n": lambda body, inner: _dtype(body[0]).type(inner(body[1])),
    "p": lambda body, _: TYPES[body],
    "a": _decode_array,
}
