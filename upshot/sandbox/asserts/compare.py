"""Comparing what a program returned with what was expected, without building anything from it.

Both become one text in which equal values are equal: sets and dictionaries are sorted there, never hashed as Python
does (a program chooses what collides), and numbers are written exactly. A long text is replaced by its digest before it
becomes part of another, so that nothing a program returns costs more than sorting it, however deep it is nested.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from typing import Any

from upshot.sandbox.asserts.split import Check
from upshot.sandbox.inside import plain

_SETS, _MAPPINGS, _BYTES = frozenset("sfk"), frozenset("dCME"), frozenset("bB")
_KNOWN = frozenset("iutN") | _SETS | _MAPPINGS | _BYTES
_SHORT = 256
_nans = itertools.count()


def holds(check: Check, data: Any) -> bool | None:
    """Whether the returned data satisfies the check; None where only more than data could tell.

    Raises on malformed data.
    """
    if check.relation in ("eq", "ne") and _has_other_shape(data, check.expected):
        return check.relation == "ne"
    if is_beyond(data):
        return None
    if check.relation == "is":
        return data is check.expected
    same = matches(data, check.expected) if check.relation in ("eq", "ne") else truth(data)
    if not same and _holds_own(data):
        return None  # what a class of the program's makes of `==` is not asked here
    return same is (check.relation in ("eq", "truthy"))


def _holds_own(data: Any) -> bool:
    """Whether some part is of a subclass of data."""
    if isinstance(data, list):
        return any(map(_holds_own, data))
    return isinstance(data, dict) and ("u" in data or any(map(_holds_own, data.values())))


def _has_other_shape(data: Any, expected: Any) -> bool:
    """Whether lists and tuples tell by their lengths that they differ: as quick as what is expected is short."""
    if isinstance(expected, tuple):
        data, expected = data.get("t") if isinstance(data, dict) else data, list(expected)
    if not isinstance(data, list) or not isinstance(expected, list):
        return False
    return len(data) != len(expected) or any(map(_has_other_shape, data, expected))


def is_beyond(data: Any) -> bool:
    """Whether some part is more than plain data: the program's own object, numpy's, a date, a fraction."""
    if isinstance(data, list):
        return any(map(is_beyond, data))
    if not isinstance(data, dict):
        return False
    ((tag, body),) = data.items()
    return tag not in _KNOWN or is_beyond(body)


def truth(data: Any) -> bool:
    """The truth of plain data."""
    if not isinstance(data, dict):
        return bool(data)
    ((tag, body),) = data.items()
    if tag == "u":
        return truth(body)
    return int(body, 16) != 0 if tag == "i" else bool(body[2] if tag == "N" else body)


def matches(data: Any, expected: Any) -> bool:
    """Whether JSON data stands for a value equal to the expected one."""
    if not isinstance(data, (list, dict)):
        return bool(data == expected)
    return canonical(data) == canonical(plain.encode(expected))


def canonical(data: Any) -> str:
    """One text for all JSON forms of equal values; a digest where it would be long."""
    text = _write(data)
    return text if len(text) <= _SHORT else f"#{hashlib.blake2b(text.encode(errors='surrogatepass')).hexdigest()}"


def _write(data: Any) -> str:
    if data is None:
        return "0"
    if isinstance(data, str):
        return f"u{len(data)}:{data}"
    if isinstance(data, int):
        return _whole(data)
    if isinstance(data, float):
        return _float(data)
    if isinstance(data, list):
        return f"[{','.join(map(canonical, data))}]"
    ((tag, body),) = data.items()
    if tag == "u":
        return _write(body)
    if tag == "t" or tag == "N":
        return f"({','.join(map(canonical, body if tag == 't' else body[2]))})"
    if tag in _SETS:
        return f"{{{','.join(sorted(map(canonical, body)))}}}"
    if tag in _MAPPINGS:
        return f"<{','.join(sorted(f'{canonical(key)}={canonical(value)}' for key, value in body))}>"
    if tag in _BYTES:
        return f"b{len(body)}:{body}"
    return _whole(int(body, 16)) if tag == "i" else f"?{tag}"  # equal to nothing that a test can write as a literal


def _float(value: float) -> str:
    if math.isnan(value):
        return f"nan{next(_nans)}"  # equal to nothing, not even to itself
    return _whole(int(value)) if value.is_integer() else f"f{value.hex()}"


def _whole(value: int) -> str:
    if -plain.BIG_INT < value < plain.BIG_INT:
        return f"i{value:x}"
    zeros = (value & -value).bit_length() - 1  # 1e308 has three hundred digits, but few that say something
    return f"i{value >> zeros:x}p{zeros}"
