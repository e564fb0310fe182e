"""How a mathematical answer is written, with what does not change its value taken away: one spelling per thing.

Unicode becomes LaTeX, sizes and spacing go, fractions and roots get their braces, repeating decimals become fractions.
A space between two digits stays unless it groups thousands: `5 6` is not 56. A text becomes `⟪…⟫`, a set `⦃…⦄`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import yaml

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
_UNICODE = str.maketrans(_TABLE["characters"])
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SAME: dict[str, str] = _TABLE["commands"]
"""Commands that are spellings of another one."""
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textup|mathrm|mbox|mathsf|mathtt)\s*\{([^{}]*)\}")
_WRAPPED = re.compile(
    r"(?<![\^_])\\(?:boxed|mathbf|mathit|boldsymbol|bm|underline)\s*\{\s*([^{}]*)\}"
    r"|\\(?:mathbf|mathit|boldsymbol|bm|vec|mathcal)\s*\{\s*([a-zA-Z])\s*\}"
)
_COLOUR = re.compile(r"\\(?:text)?color\s*(?:\{[^{}]*\}|[a-z]+)")
_NAMED = re.compile(r"\\operatorname\*?\s*\{\s*([a-zA-Z]+)\s*\}")
_FUNCTION_NAMES = r"(sqrt|pi|infty|infinity|sin|cos|tan|log|ln|arctan|arcsin|arccos)"
_PLAIN_NAMES = re.compile(rf"⟪{_FUNCTION_NAMES}⟫|⟪[^⟪⟫]*⟫|(?<![\\a-zA-Z]){_FUNCTION_NAMES}(?![a-zA-Z])", re.IGNORECASE)
"""Names without their backslash, alone in a text or outside of one; other texts match as a whole and stay."""
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?")
_GROUPED = re.compile(r"(?<![\d.\\])\d{1,3}(?:(?:\\,|\{,\}|\s)\d{3})+(?![\d,])")
NEW_ROW = "⏎"
_THOUSANDS = re.compile(r"[^\d(\[⦃,]*\d{1,3}(?:,\d{3})+(?:\.\d+)?[^\d)\]⦄,]*(?:\^\{?[23]\}?)?")
_OVER = re.compile(r"\{([^{}]*)\\over(?![a-z])\s*([^{}]*)\}")


def canonical(text: str) -> str:
    """The one spelling of an answer, its spaces kept."""
    out = _COLOUR.sub("", _unwrap(text.strip())).replace("\\\\", NEW_ROW)
    out = re.sub(r"\{(?:[bBp]|small)matrix\}", "{matrix}", out)
    out = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: "^{" + m[0].translate(_RAISED) + "}", out)
    out = re.sub("[₀-₉]+", lambda m: "_{" + m[0].translate(_LOWERED) + "}", out)
    out = out.translate(_UNICODE)
    out = re.sub(r"√\s*(\d+(?:\.\d+)?|[a-zA-Z])", r"\\sqrt{\1}", out).replace("√", "\\sqrt")
    out = _GROUPED.sub(lambda m: re.sub(r"\D", "", m[0]), re.sub(r"\\!\s*", "", out))
    out = _NAMED.sub(r"\\\1 ", _WRAPPED.sub(r"\1\2", out.replace("\\mathbb{R}", "\\R ")))
    out = _TEXT.sub(_text, out)
    out = _COMMAND.sub(_command, out)
    out = _PLAIN_NAMES.sub(_plain_name, out)
    out = re.sub(r"\\[,;: ]|~|(?<!\\)\$", " ", out.replace("\\{", "⦃").replace("\\}", "⦄").replace("**", "^"))
    out = _OVER.sub(r"\\frac{\1}{\2}", out)
    out = _REPEATING.sub(_as_fraction, out)
    if _THOUSANDS.fullmatch(out):  # commas of one number, not of a list or pair
        out = out.replace(",", "")
    return re.sub(r"\s+", " ", _brace(out)).strip()


def _unwrap(text: str) -> str:
    """Without the signs of mathematics mode around the whole, and a final full stop."""
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
            text = text[len(opening) : len(text) - len(closing)].strip()
    return re.sub(r"(?<!\.)\.$", "", text)


def _command(match: re.Match[str]) -> str:
    same = _SAME.get(match[1])
    if same is None:
        return match[0]
    return f"\\{same} " if same.isalpha() else same


def _text(match: re.Match[str]) -> str:
    """A text in its marks; a number that it begins with stands before them, and one without letters needs none."""
    number, words = re.fullmatch(r"\s*(-?\d[\d.,]*(?=\s+[a-zA-Z]))?(.*)", match[1], re.DOTALL).groups()  # type: ignore[union-attr]
    return f"{number or ''} ⟪{words.strip()}⟫" if re.search("[a-zA-Z]", words) else f" {match[1]} "


def _plain_name(match: re.Match[str]) -> str:
    name = (match[1] or match[2] or "").lower()
    return match[0] if not name else "\\infty " if name == "infinity" else f"\\{name} "


def _as_fraction(match: re.Match[str]) -> str:
    """0.1\\overline{6} as a fraction."""
    whole, fixed, repeated = match[1] or "0", match[2], match[3]
    if len(fixed) + len(repeated) > 30:
        return match[0]
    shift = 10 ** len(fixed)
    value = Fraction(int(whole + fixed), shift) + Fraction(int(repeated), shift * (10 ** len(repeated) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _brace(text: str) -> str:
    """Fractions and roots with the braces that TeX lets one leave out; decimals with their zero."""
    out = re.sub(r"\\frac\s*(\d)\s*(?=[\d{])", r"\\frac{\1}", text)
    out = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", out)
    out = re.sub(r"\\sqrt\s*(\d)(?!\d)", r"\\sqrt{\1}", out)
    out = re.sub(r"\\binom\s*(\d)\s*(\d)", r"\\binom{\1}{\2}", out)
    out = re.sub(r"(?<![\d./}])(\d+) (\d+)\s?/\s?(\d+)(?![\d/])", r"\1\\frac{\2}{\3}", out)
    return re.sub(r"(\d)\.(?![\d.])", r"\1", re.sub(r"(?<![\d.])\.(?=\d)", "0.", out))


def closed_up(text: str) -> str:
    """A canonical spelling without its spaces, except in texts, between two digits and behind a command's name."""
    return "".join(part if part[:1] == "⟪" else _closed_up(part) for part in re.split("(⟪[^⟪⟫]*⟫)", text))


def _closed_up(text: str) -> str:
    out = re.sub(r"(?<!\d) | (?!\d)", "\x00", text)
    out = re.sub(r"(\\[a-zA-Z]+)\x00(?=[a-zA-Z])", r"\1 ", out)
    return out.replace("\x00", "")


def top_level(text: str, separators: re.Pattern[str]) -> list[str]:
    """The pieces and, between them, the separators of a text that stand outside all brackets."""
    pieces: list[str] = []
    depth = start = position = 0
    while position < len(text):
        character = text[position]
        depth += (character in "([{⦃") - (character in ")]}⦄")
        match = separators.match(text, position) if depth == 0 else None
        if match:
            pieces += [text[start:position].strip(), match[0]]
            start = position = match.end()
        else:
            command = _COMMAND.match(text, position)
            position = command.end() if command else position + 1
    return [*pieces, text[start:].strip()]
