"""Whether two mathematical answers are the same value: strings first, exact numbers next, math-verify last.

math-verify (sympy underneath) is taken for the long tail: sets, intervals, equations, matrices, symbolic equality. It
is used strict, without its own timeouts: those are whole-second alarms that raise off the main thread. Whoever calls
`equivalent` bounds it from outside (see `workers`). What is not an answer is refused before it gets there: arithmetic
left undone, integrals, `1=2`, towers of powers.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from upshot.verifiers.expressions import same_value
from upshot.verifiers.math_answer import MAX_ANSWER, normal_form
from upshot.verifiers.numbers import parse_number

_OPERATORS = re.compile(r"\\(?:int|iint|oint|sum|prod|lim|frac\{d\}|partial|binom|tbinom|dbinom|det)(?![a-z])|!")
_LITERAL = r"(?:\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\})"
_NOT_COEFFICIENT = (
    r"(?![\d.]|\s*(?:[a-zA-Z(]|\\(?:sqrt|pi|frac|cdot|times|cos|sin|tan|log|ln|theta|alpha|text)|\^|\{|/))"
)
_UNDONE = re.compile(
    rf"(?:{_LITERAL}|\))\s*[-+]\s*{_LITERAL}{_NOT_COEFFICIENT}"
    rf"|(?:\d|\))\s*(?:\\cdot|\\times|\*|×|÷|\\div)\s*(?!10\s*\^)(?:{_LITERAL}|\()"
)
_TOWER = re.compile(
    r"\^\s*(?:\{[^{}]{0,40}|\w)\^|\*\*\s*\(?[\w.]{1,40}\s*\*\*|\^\s*\{?\s*-?\d{4,}|\*\*\s*\(?-?\d{4,}|\d{400,}"
    r"|\)\s*\^\s*\{?\s*(?:[3-9]\d|\d{3,})"
)
_NAME = re.compile(r"[a-zA-Z\\]")


def refusal(answer: str, truth: str) -> str | None:
    """Why an answer is none, however equal it may be to the truth; None when it may be compared."""
    if len(answer) > MAX_ANSWER:
        return "answer too long"
    if _TOWER.search(answer) and not _TOWER.search(truth):
        return "power too large"
    if _depth(answer) > 12 or answer.count("=") > 10 or answer.count("+") > 60:
        return "nested too deeply"
    if _OPERATORS.search(answer) and not _OPERATORS.search(truth):
        return "not evaluated"
    if "=" in answer and "=" not in truth:
        left = answer.rpartition("=")[0]
        sides = [side for side in re.split(r"[=,;]|\\(?:text)?and", left) if side.strip()]
        if any(not _NAME.search(side.replace("\\frac", "").replace("\\sqrt", "")) for side in sides[:1]):
            return "an equation, not a value"
    if _variables(truth):
        return None
    value = _value(answer)
    if _UNDONE.search(value) and not _UNDONE.search(truth):
        return "not evaluated"
    if _variables(value) and "=" not in truth and not re.fullmatch(r"[-\d.,/]+[a-zA-Z]+", value):  # '5m' may be metres
        return "a variable where the truth has none"
    return None


def _value(answer: str) -> str:
    return answer.rpartition("=")[2]


def _variables(text: str) -> bool:
    return bool(re.search(r"(?<![\\a-zA-Z])[a-hj-zA-HJ-Z](?![a-zA-Z])", re.sub(r"\\[a-zA-Z]+", " ", text)))


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth -= 1
    return deepest


def quick_verdict(answer: str, truth: str) -> bool | None:
    """Equal or not where strings or exact numbers settle it; None when mathematics is needed."""
    if answer.strip() == truth.strip():
        return True
    if len(answer) > MAX_ANSWER:
        return False
    left, right = normal_form(answer), normal_form(truth[: 10 * MAX_ANSWER])
    if not left:
        return False
    if left == right:
        return True
    if refusal(left, right) is not None:
        return False
    name, sign, value = left.rpartition("=")
    if sign and "=" not in right and value and re.fullmatch(r"[a-zA-Z](?:_\{?\w+\}?)?(?:\([a-z]\))?", name):
        left = value
        if left == right:
            return True
    if re.fullmatch(r"[A-Za-z]+", left) and re.fullmatch(r"[A-Za-z]+", right):
        return left.lower() == right.lower() if len(left) > 1 else False
    return _same(left, right)


def _same(left: str, right: str) -> bool | None:
    first, second = _exact(left), _exact(right)
    if first is not None and second is not None:
        return first == second
    if _BRACKETED.match(left) or _BRACKETED.match(right) or "," in left + right:
        return _same_collection(left, right)
    return same_value(left, right)


def _same_collection(left: str, right: str) -> bool | None:
    """Lists, tuples, intervals and sets, item by item; None when an item cannot be compared."""
    first, second = _collection(left), _collection(right)
    if first is None or second is None or first[0] != second[0]:
        return None
    kind, items = first
    others = list(second[1])
    if len(items) != len(others):
        return False
    if kind not in ("", "{}"):  # the order of a set or of a plain list of solutions does not matter
        verdicts = [True if a == b else _same(a, b) for a, b in zip(items, others, strict=True)]
        return False if False in verdicts else None if None in verdicts else True
    for item in items:
        verdicts = [True if item == other else _same(item, other) for other in others]
        if True not in verdicts:
            return None if None in verdicts else False
        others.pop(verdicts.index(True))
    return True


_BRACKETED = re.compile(r"[(\[{][^()\[\]]*[)\]}]$")


def _collection(text: str) -> tuple[str, list[str]] | None:
    """The brackets and items of a flat list of two or more; None when it is not one."""
    bare = re.fullmatch(r"([(\[{]?)([^()\[\]]*,[^()\[\]]*)([)\]}]?)", text)
    if bare is None or bool(bare[1]) != bool(bare[3]):
        return None
    items = bare[2].split(",")
    return (bare[1] + bare[3], items) if all(items) else None


def _exact(text: str) -> Fraction | None:
    power = re.fullmatch(r"(-?\d+(?:\.\d+)?)(?:\\times|\\cdot|\*|×)10\^\{?(-?\d{1,2})\}?", text)
    if power:
        return Fraction(power[1]) * Fraction(10) ** int(power[2])
    if re.search(r"[a-zA-Z(\[]", text.replace("\\frac", "")):  # '(1,000)' is a pair, not a thousand
        return None
    return parse_number(text)


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

    gold, given = _parsed(truth), _parsed(answer)
    if not gold or not given or _refuted(gold[0], given[0]):
        return False
    return bool(verify(gold, given, strict=True, timeout_seconds=None, raise_on_error=False))


_POINTS = ("0.7368421", "1.3173913", "2.1929824", "0.4117647")
"""Where two expressions are compared before any algebra: not special to any function."""


def _refuted(gold: Any, given: Any) -> bool:
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
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, ArithmeticError, AttributeError):
        return False
    return abs(first - second) > 4e-6 * (1 + abs(first))


@lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    """math-verify's reading; kept, because all samples of a prompt share the truth and many share an answer."""
    import logging

    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that timeouts are ours
    boxed = "\\boxed{" + text.strip().strip("$") + "}"
    found: list[Any] = parse(boxed, parsing_timeout=None, raise_on_error=False)
    return found


def same_answer(answer: str, truth: str) -> bool:
    """Whether two answers are equal in value."""
    verdict = quick_verdict(answer, truth)
    if verdict is None:
        verdict = equivalent(normal_form_for_parsing(answer), normal_form_for_parsing(truth))
    return verdict


def normal_form_for_parsing(text: str) -> str:
    """The answer with its spacing kept, as the parser wants it."""
    return text.strip().replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
