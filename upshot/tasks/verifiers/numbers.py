"""Numbers in text, as exact fractions. Everything is linear in the text and bounded in the size of a number.

Covers signs (also `−` and `-$5`), thousands commas, decimals, `$ € £`, a trailing `%` (a unit: 50% is 50), plain and
LaTeX fractions, mixed numbers, `1e3`, `5k` and `5 million`. Does not cover number words, roots or expressions: see
`math`. `not 5`, `at least 5` and `5 and a half` are not the number 5.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from pathlib import Path

import yaml

from upshot.tasks.verifiers.math.units import unit_of

MAX_DIGITS = 100
"""Longer digit strings are not read as numbers: nobody means them, and arithmetic on them is slow."""

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_PLAIN = rf"(?:{_UNSIGNED})(?:[eE][+-]?\d{{1,2}}(?![\w.]))?"
NUMBER = re.compile(
    r"(?<![\w.])(?<!\d,)(?P<sign>(?<![\d)\]}%])[-−–]\s?|\+)?[$€£]?(?P<sign2>(?<=[$€£])[-−])?"
    rf"(?:(?P<whole>\d{{1,9}})\s(?=\d{{1,9}}/\d))?(?P<top>{_PLAIN})(?:\s?/\s?(?P<bottom>{_UNSIGNED}))?(?P<percent>\s?\\?%)?"
    r"(?:(?P<scale>\s?[kK]|\s(?:hundred|thousand|million|billion|trillion))(?!\w))?"
)
_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
_SCALES: dict[str, int] = _TABLE["scales"]
_DENIED = re.compile(r"(?:\bnot|n't|\bnever|\bno)\s+$", re.IGNORECASE)
_SAID, _SAID_BEFORE = ("|".join(_TABLE[name].split()) for name in ("said", "said_before"))
_ABOUT = re.compile(
    rf"\b(?:{_SAID})\b|n't|^.*\b(?:{_SAID_BEFORE})\b[^\0]*\0|\0 ?[xyznie]\b|!.*\0|[?❌✗✘✖]",
    re.IGNORECASE | re.DOTALL,
)
"""What makes the number on a line (\\0) something other than the answer: words about it, and other numbers in words."""
_UNIT_SIGNS = re.compile(
    r"(?<![a-zA-Z])(mm|cm|m|km|in|ft|yd|mi|feet|inches|meters|miles|yards)(?:\^[23]\b|[²³])|(?<=[a-zA-Z\d])/(?=[a-zA-Z])"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?\d{1,30})\s*\}\s*\{\s*(-?\d{1,30})\s*\}|(\d)\s*(\d))")
_WRAPPING = re.compile(
    r"(?<![\d)])\*\*|\*\*(?![\d(])|__|\\\$|\\boxed|\\text\s*\{|\\mathrm\s*\{|\\!|\\,|\\;|\\ |[{}`]|\\\(|\\\)|\\\[|\\\]"
)


def plain(text: str) -> str:
    """The text without markdown and LaTeX wrapping around numbers; `\\frac{a}{b}` becomes `a/b`."""
    text = _LATEX_FRACTION.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]}", text)
    return _WRAPPING.sub("", text).replace("\\dollar", "$")


def to_fraction(match: re.Match[str]) -> Fraction | None:
    """The value of a `NUMBER` match; None when it is too large or divides by zero."""
    top, bottom = match["top"], match["bottom"] or "1"
    if max(len(top), len(bottom)) > MAX_DIGITS or not (below := Fraction(bottom.replace(",", ""))):
        return None
    value = Fraction(top.replace(",", "")) / below + int(match["whole"] or 0)
    if match["scale"]:
        value *= 10 ** _SCALES[match["scale"].strip().lower()]
    signs = (match["sign"] or "") + (match["sign2"] or "")
    return -value if re.search("[-−–]", signs) else value


def last_number(text: str) -> Fraction | None:
    """The last number in a text that is not denied; only its last 4,000 characters are looked at."""
    text = plain(text[-4000:])
    matches = [
        match for match in NUMBER.finditer(text) if not _DENIED.search(text[max(0, match.start() - 9) : match.start()])
    ]
    return to_fraction(matches[-1]) if matches else None


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is one number, perhaps with a currency sign or unit words around it; else None."""
    text = _UNIT_SIGNS.sub(r"\1 ", plain(text.strip()))
    if len(text) > 4 * MAX_DIGITS:
        return None
    matches = list(NUMBER.finditer(text))
    if len(matches) != 1:
        return None
    match = matches[0]
    if match[0] == text:
        return to_fraction(match)
    around = f"{text[: match.start()]}\0{text[match.end() :]}"
    attached = re.match(r"\w+", text[match.end() :])
    if attached and attached[0].lower() not in ("am", "pm") and unit_of(attached[0]) is None:
        return None  # 5x, 5M, 5th, 5½
    if re.search(r"\d|[-+*/^=<>~|\\]", around) or _ABOUT.search(around):
        return None
    if not around.isascii() and any(unicodedata.category(sign) in ("Sm", "No") for sign in around):
        return None  # ≈, ±, ½
    return to_fraction(match)


def show_number(value: Fraction) -> str:
    """A number as a person writes it: 12, -0.5, 1/3."""
    if value.denominator == 1:
        return str(value.numerator)
    for places in range(1, 10):
        scaled = value * 10**places
        if scaled.denominator == 1:
            digits = f"{abs(scaled.numerator):0{places + 1}d}"
            return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    return f"{value.numerator}/{value.denominator}"
