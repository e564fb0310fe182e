"""math-verify (sympy underneath) for what spelling, kinds and exact values do not settle: identities of functions.

It is used strict, without its own timeouts: those are whole-second alarms that raise off the main thread. Whoever calls
`equivalent` bounds it from outside (see `workers`). It reads LaTeX with whichever antlr runtime is installed (4.9.3,
4.11 or 4.13): its parser has tables for each.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

WARM_UP: tuple[tuple[str, str], ...] = (
    ("\\frac{x+1}{2}", "\\frac{1+x}{2}"),
    ("(x+1)^2", "x^{2}+2x+1"),
    ("3\\sqrt{2}-1", "-1+\\sqrt{18}"),
    ("y = 2x - 7", "2x-7"),
    ("36\\pi", "4 \\cdot 9 \\pi"),
    ("3+2i", "2i+3"),
    ("\\left(\\frac{1}{2}, -3\\right)", "(0.5,-3)"),
    ("(-\\infty, 2) \\cup [3, \\infty)", "(-\\infty,2)\\cup[3,\\infty)"),
    ("\\{1, 2, \\sqrt{3}\\}", "\\{\\sqrt{3},2,1\\}"),
    ("1, -2, \\frac{x}{3}", "-2,1,x/3"),
    ("\\log_2 3", "\\frac{\\ln 3}{\\ln 2}"),
    ("\\sin^2 x + e^{-x}", "e^{-x}+\\sin^2 x"),
    ("x \\geq 2", "x \\ge 2"),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    ("\\frac{a}{b+c} - 3abc", "\\frac{a}{c+b}-3cba"),
    ("2^{10} \\cdot 5", "5120"),
)
"""Pairs that fill the parser's prediction tables, which are otherwise built at a hundred times the cost per answer."""


@lru_cache(maxsize=4096)
def equivalent(answer: str, truth: str) -> bool:
    """math-verify's strict verdict. May take long: run it where it can be stopped."""
    from math_verify import verify

    gold, given = _parse(truth), _parse(answer)
    if not gold or not given or _refutes(gold[0], given[0]):
        return False
    return bool(verify(gold, given, strict=True, timeout_seconds=None, raise_on_error=False))


_POINTS = ("0.7368421", "1.3173913", "2.1929824", "0.4117647")
"""Where two expressions are compared before any algebra: not special to any function."""


def _refutes(gold: Any, given: Any) -> bool:
    """Whether two expressions differ in value at one point: far cheaper than failing to simplify them."""
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(given, sympy.Expr)):
        return False
    symbols = sorted(gold.free_symbols | given.free_symbols, key=str)
    if len(symbols) > len(_POINTS) or gold.count_ops() + given.count_ops() > 200:
        return False
    try:
        at = {symbol: sympy.Float(value) for symbol, value in zip(symbols, _POINTS, strict=False)}
        first, second = (complex(expression.subs(at).evalf(12)) for expression in (gold, given))
        return abs(first - second) > 4e-6 * (1 + abs(first))  # numbers beyond a float are left to algebra
    except (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError):
        return False


@lru_cache(maxsize=4096)
def _parse(text: str) -> list[Any]:
    """math-verify's reading; kept, because all samples of a prompt share the truth and many share an answer."""
    import logging

    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that timeouts are ours
    boxed = "\\boxed{" + text.strip().strip("$") + "}"
    found: list[Any] = parse(boxed, parsing_timeout=None, raise_on_error=False)
    return found


def normal_form_for_parsing(text: str) -> str:
    """The answer with its spacing kept, as the parser wants it."""
    return text.strip().replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
