"""Data and assets → one HTML page that needs nothing else.

Two locks against hostile text in transcripts: the embedded JSON holds no `<`, `>` or `&`, so it cannot leave its script
element; and the page's content policy allows only the one script it was written with and no network at all.
The script itself builds the page from text nodes, never from markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from importlib.resources import files
from typing import Any

SCRIPTS = ("dom.js", "overview.js", "curves.js", "breakdown.js", "classmates.js", "conversations.js", "main.js")


def render(title: str, data: dict[str, Any]) -> str:
    """The page."""
    script = '"use strict";\n(() => {\n' + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _asset("page.html")
    parts = {
        "%TITLE%": html.escape(title),
        "%POLICY%": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:",
        "%STYLE%": _asset("page.css"),
        "%SCRIPT%": script,
        "%DATA%": embed(data),
    }
    # One pass from left to right, so that a placeholder inside the data stays what it is: text.
    out, rest = [], page
    for mark in sorted(parts, key=page.index):
        before, rest = rest.split(mark, 1)
        out += [before, parts[mark]]
    return "".join([*out, rest])


def embed(data: Any) -> str:
    """JSON that is safe inside a script element, and that browsers can parse: no NaN, no Infinity."""
    text = json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A lone surrogate cannot be written as UTF-8; its JSON escape can.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def _asset(name: str) -> str:
    return (files("upshot.run.report") / "assets" / name).read_text("utf-8")
