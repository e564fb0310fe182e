"""Comparing what a program returned with what was expected, without building anything from it.

Both become one text in which equal values are equal: sets and dictionaries are sorted there, never hashed as Python
does (a program chooses what collides), and numbers are written exactly. A long text is replaced by its digest before it
becomes part of another, so that nothing a program returns costs more than sorting it, however deep it is nested.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from decimal import Decimal
from typing import Any

from upshot.sandbox.asserts.split import Check
from upshot.sandbox.inside import plain

_SETS, _MAPPINGS, _BYTES = frozenset("sfk"), frozenset("dCME"), frozenset("bB")
_SHORT = 256
_LONGEST = 4000
"""Digits of a Decimal that may equal a number somebody can write down."""
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
    """Whether some part is one of the program's own objects, or numpy's, which have an equality of their own."""
    if isinstance(data, list):
        return any(map(is_beyond, data))
    if not isinstance(data, dict):
        return False
    ((tag, body),) = data.items()
    return tag in ("o", "a") or (tag == "n" and body[0][1:] in ("f2", "f4", "f16", "c8", "c32")) or is_beyond(body)


def truth(data: Any) -> bool:
    """The truth of returned data; an object that is not data is true, as objects are."""
    if not isinstance(data, dict):
        return bool(data)
    ((tag, body),) = data.items()
    if tag == "u":
        return truth(body)
    if tag == "i":
        return int(body, 16) != 0
    if tag in ("c", "T"):
        return body[0] != "timedelta" or any(body[1]) if tag == "T" else any(body)
    if tag == "D":
        return bool(Decimal(body[:_LONGEST]))
    if tag in ("F", "n"):
        return truth(body[0] if tag == "F" else body[1])
    if tag == "r":
        return bool(range(*(_integer(part) for part in body)))
    if tag == "N":
        return len(body[2]) > 0
    return bool(body)


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
    return _number(tag, body)


def _number(tag: str, body: Any) -> str:
    if tag == "i":
        return _whole(int(body, 16))
    if tag == "n":
        return _write(body[1])
    if tag == "c":
        return canonical(body[0]) if body[1] == 0 else f"c{canonical(body[0])},{canonical(body[1])}"
    if tag == "D":
        return _decimal(body)
    if tag == "F":
        return _ratio(_integer(body[0]), _integer(body[1]))
    return f"?{tag}"  # a deque, a range, a date: equal to nothing that a test can write down as a literal


def _float(value: float) -> str:
    if math.isnan(value):
        return f"nan{next(_nans)}"  # equal to nothing, not even to itself
    return _whole(int(value)) if value.is_integer() else f"f{value.hex()}"


def _whole(value: int) -> str:
    if -plain.BIG_INT < value < plain.BIG_INT:
        return f"i{value:x}"
    zeros = (value & -value).bit_length() - 1  # 1e308 has three hundred digits, but few that say something
    return f"i{value >> zeros:x}p{zeros}"


def _integer(data: Any) -> int:
    if isinstance(data, dict):
        return int(data["i"], 16)
    return int(data)


def _decimal(text: str) -> str:
    if len(text) > _LONGEST:
        return f"D{text}"
    value = Decimal(text)
    if value.is_nan():
        return f"nan{next(_nans)}"
    number = float(value)
    if value == number:
        return _float(number)
    return _whole(int(text)) if text.lstrip("-").isdecimal() else f"D{text}"


def _ratio(numerator: int, denominator: int) -> str:
    """A fraction in lowest terms; one that is not is equal to nothing, and its divisor is not looked for."""
    if denominator < 1:
        raise ValueError("a fraction whose denominator is not positive")
    if denominator == 1:
        return _whole(numerator)
    if denominator & (denominator - 1) == 0 and max(numerator.bit_length(), denominator.bit_length()) < 1100:
        number = numerator / denominator
        if number.as_integer_ratio() == (numerator, denominator):
            return _float(number)
    return f"F{numerator:x}/{denominator:x}"
