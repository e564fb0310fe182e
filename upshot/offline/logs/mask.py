"""Masks email addresses, phone and card numbers in a text; names, postal addresses and everything else stay."""

from __future__ import annotations

import re
from collections import Counter

_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]++@[\w-]+(?:\.[\w-]+)+")
_DIGITS = re.compile(r"(?<![\w.,])(?!\d{4}-\d\d-\d\d)\+?\(?\d(?:[ ().-]{0,2}\d){6,18}(?![\w])")
_DIGIT = re.compile(r"\d")
"""A quick test, which most texts fail, before the slower search for where a number begins."""
CARD_DIGITS = range(13, 20)
PHONE_DIGITS = range(9, 16)


def mask(text: str, counts: Counter[str]) -> str:
    """The text with [email], [phone] and [card] in place of such data; each is counted."""

    def number(match: re.Match[str]) -> str:
        digits = "".join(filter(str.isdigit, match[0]))
        if len(digits) in CARD_DIGITS and is_card(digits):
            name = "card"
        elif len(digits) in PHONE_DIGITS or match[0].startswith("+"):
            name = "phone"
        else:
            return match[0]
        counts[name] += 1
        return f"[{name}]"

    if "@" in text:
        text, emails = _EMAIL.subn("[email]", text)
        if emails:
            counts["email"] += emails
    return _DIGITS.sub(number, text) if _DIGIT.search(text) else text


def is_card(digits: str) -> bool:
    """Whether a number passes the check of card numbers (Luhn): every second digit from the right counts twice."""
    doubled = (int(digit) * (1 + place % 2) for place, digit in enumerate(reversed(digits)))
    return sum(value - 9 * (value > 9) for value in doubled) % 10 == 0
