"""math-verify (sympy underneath) for what spelling, kinds and exact values do not settle: identities of functions.

It is used strict, without its own timeouts: those are whole-second alarms that raise off the main thread. Whoever calls
`equivalent` bounds it from outside (see `workers`). It reads LaTeX with whichever antlr runtime is installed (4.9.3,
4.11 or 4.13): its parser has tables for each.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

WARM_UP: list[tuple[str, str]] = yaml.safe_load(Path(__file__).with_name("warm_up.yaml").read_text("utf-8"))


@lru_cache(maxsize=4096)
def equivalent(answer: str, truth: str) -> bool:
    """math-verify's strict verdict. May take long: run it where it can be stopped."""
    from math_verify import verify

    gold, read = _parse(truth), _parse(answer)
    if not gold or not read or _refutes(gold[0], read[0]):
        return False
    return bool(verify(gold, read, strict=True, timeout_seconds=None, raise_on_error=False))


_POINTS = ("0.7368421", "1.3173913", "2.1929824", "0.4117647")
"""Where two expressions are compared before any algebra: not special to any function."""


def _refutes(gold: Any, answer: Any) -> bool:
    """Whether two expressions differ in value at one point: far cheaper than failing to simplify them."""
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if len(symbols) > len(_POINTS) or gold.count_ops() + answer.count_ops() > 200:
        return False
    with suppress(TypeError, ValueError, ArithmeticError, AttributeError, RecursionError):
        at = {symbol: sympy.Float(value) for symbol, value in zip(symbols, _POINTS, strict=False)}
        first, second = (complex(expression.subs(at).evalf(12)) for expression in (gold, answer))
        return abs(first - second) > 4e-6 * (1 + abs(first))  # numbers beyond a float are left to algebra
    return False


@lru_cache(maxsize=4096)
def _parse(text: str) -> list[Any]:
    """math-verify's reading; kept, because all samples of a prompt share the truth and many share an answer."""
    import logging

    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that timeouts are ours
    bare = text.strip().replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").strip("$")
    parsed: list[Any] = parse("\\boxed{" + bare + "}", parsing_timeout=None, raise_on_error=False)
    return parsed
