"""What stands around a value in an answer: a unit, a counted thing, `The answer is`. And what may not stand there.

A unit may be left out, never changed: 10 cm is 10 and 100 mm, but not 10 m. `20 million` is a number of its own. Words
that say something about the number (`is not the answer`, `or so`, `at least`) make it no value at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import yaml

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
_SIZES = {
    name: (dimension, Fraction(str(size)))
    for dimension, sizes in _TABLE["sizes"].items()
    for name, size in sizes.items()
}
_ALIASES = {alias: name for name, aliases in _TABLE["names"].items() for alias in (name, *aliases.split())}
_KNOWN = {*_SIZES, *_ALIASES, *_ALIASES.values(), *_TABLE["counted"].split()}
_ABOUT = frozenset(_TABLE["about"].split())
_SCALES: dict[str, int] = _TABLE["scales"]
_LEAD = re.compile(_TABLE["lead"], re.IGNORECASE)
_LABEL = re.compile(r"\(?([A-J])\)?[.:]?")
_OPENING = re.compile(r"⟪([^⟪⟫]*)⟫")
_CURRENCIES = {"\\$": "dollar", "€": "euro", "£": "pound"}
_MONEY = re.compile(r"^(-?)\s*(\\\$|€|£)\s*(-?)")
_PERCENT = re.compile(r"\s*(?:\\?%)$")
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:⟪?\s*[CF]\s*⟫?)?$")
_ENDING = re.compile(r"(?:\s*/?\s*⟪[^⟪⟫]*⟫(?:\^\{?-?\d\}?)?)+$")
_WORDS = re.compile(r"(?<=[\d})⦄])(?:\s+|(?=[a-z]{2}))([a-zA-Z][a-zA-Z' ./]*?)((?:\s*\^\s*\{?[23]\}?)?)\.?$")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")


@dataclass(frozen=True, slots=True)
class UnitValue:
    """A value and what it stands in."""

    body: str
    unit: str = ""
    label: str = ""
    """The letter of a choice in front of it: `(C) 12`."""


def split_unit(text: str) -> UnitValue | None:
    """The value in a canonical answer and its unit; None when the words around it say something about it."""
    label = ""
    if opening := _OPENING.match(text):
        rest = text[opening.end() :].strip()
        lettered = _LABEL.fullmatch(opening[1].strip())
        if rest and lettered:
            text, label = rest, lettered[1]
        elif rest and _LEAD.fullmatch(opening[1].strip()):
            text = rest
    elif lead := _LEAD.match(text):
        text = text[lead.end() :].strip() or text
    if money := _MONEY.match(text):
        amount, currency = split_unit(text[money.end() :].strip()), _CURRENCIES[money[2]]
        unit = f"{currency} {amount.unit.removeprefix(currency)}".strip() if amount else ""
        return amount and UnitValue(money[1] + money[3] + amount.body, unit, label)
    if percent := _PERCENT.search(text):
        return UnitValue(text[: percent.start()], "percent", label)
    if (degrees := _DEGREES.search(text)) and not _FUNCTION.search(text):
        return UnitValue(text[: degrees.start()], "degree", label)
    ending = _ENDING.search(text)
    if ending and ending.start() > 0:
        return _split(text[: ending.start()].strip(), re.sub("[⟪⟫]", " ", ending[0]), label, sure=True)
    if bare := _WORDS.search(text):
        return _split(text[: bare.start()].strip(), bare[1] + bare[2], label, sure=False)
    return UnitValue(text, "", label)


def _split(body: str, phrase: str, label: str, sure: bool) -> UnitValue | None:
    """A value and the phrase behind it; a bare word that is not a unit may be a product of letters, a text may not."""
    words = phrase.split()
    if words and words[0].lower() in _SCALES:
        scaled = f"{body}\\times 10^{{{_SCALES[words[0].lower()]}}}"
        if len(words) == 1:
            return UnitValue(scaled, "", label)
        body, phrase = scaled, " ".join(words[1:])
    if (unit := unit_of(phrase)) is not None:
        return UnitValue(body, unit, label)
    about = any(word.lower().strip(".,") in _ABOUT for word in words)
    letters = len(phrase.partition("^")[0])
    return UnitValue(f"{body} {phrase}", "", label) if not sure and not about and letters <= 4 else None


def unit_of(phrase: str) -> str | None:
    """The one name of a unit or a counted thing; None for any other words."""
    phrase = re.sub(r"\s*\^\s*\{?(-?\d)\}?", r"^\1", phrase.strip().strip(".,")).replace("²", "^2").replace("³", "^3")
    phrase = re.sub(r"(?<=[a-z])\s*/\s*(?=[a-z])|\bper\b", " / ", re.sub(r"\bmph\b", "mi / h", phrase))
    power = {"square": "^2", "sq": "^2", "sq.": "^2", "cubic": "^3"}
    words = phrase.split()
    if not words or len(words) > 5 or any(word.lower() in _ABOUT or word.lower() in _SCALES for word in words):
        return None
    if words[0].lower() in power and len(words) > 1:
        words = [*words[1:-1], words[-1] + power[words[0].lower()]]
    if not all(re.fullmatch(r"[a-zA-Z'.-]+(?:\^-?\d)?|/|[°%¢]", word) for word in words):
        return None
    named = [_unit_name(word) for word in words]
    counted = words[-1].endswith("s") and len(words[-1].strip("s")) > 1
    return " ".join(named) if counted or re.sub(r"\^-?\d$", "", named[-1]) in _KNOWN else None


def _unit_name(word: str) -> str:
    name, raised, power = word.rstrip(".").partition("^")
    name = name if name in _ALIASES or len(name) == 1 else name.lower()
    singular = name[:-1] if name.endswith("s") and len(name) > 2 else name
    return _ALIASES.get(name, _ALIASES.get(singular, singular)) + raised + power


def unit_factor(answer: str, wanted: str) -> Fraction | None:
    """By what to multiply a value in one unit to have it in the other; None when they measure different things."""
    if answer == wanted or not answer or not wanted:
        return Fraction(1)
    (name, _, power), (other, _, other_power) = answer.partition("^"), wanted.partition("^")
    first, second = _SIZES.get(name), _SIZES.get(other)
    if first is None or second is None or first[0] != second[0] or power != other_power:
        return None
    return (first[1] / second[1]) ** int(power or 1)
