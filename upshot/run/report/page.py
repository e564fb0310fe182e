"""Data and assets → one HTML page that needs nothing else.

Three locks against hostile text in transcripts: the embedded JSON holds no `<`, `>` or `&`, so it cannot leave its
script element; the page's content policy allows only the one script it was written with, and no network beyond the
server that it came from; and the script builds the page from text nodes, never from markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

from upshot.core.files import to_json_value

SCRIPTS = (
    "dom.js", "source.js", "chart.js", "curves.js", "breakdown.js", "tokens.js", "tree.js", "compare.js", "overview.js",
    "list.js", "beside.js", "conversations.js", "main.js",
)  # fmt: skip


def render(title: str, data: dict[str, Any] | None) -> str:
    """The page; without data it is the server's, and asks for them."""
    script = '"use strict";\n(() => {\n' + "\n".join(read_asset(name) for name in SCRIPTS) + "\n})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    network = "connect-src 'self'" if data is None else "connect-src 'none'"
    parts = {
        "%TITLE%": html.escape(title),
        "%POLICY%": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'; {network}",
        "%STYLE%": read_asset("page.css"),
        "%SCRIPT%": script,
        "%DATA%": embed(data),
    }
    # One pass from left to right, so that a placeholder inside the data stays what it is: text.
    return re.sub("|".join(parts), lambda mark: parts[mark[0]], read_asset("page.html"))


def embed(data: Any) -> str:
    """JSON that is safe inside a script element."""
    text = dump(data)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def dump(data: Any) -> str:
    """JSON that browsers can parse: no NaN, no Infinity, no lone surrogate but as an escape."""
    try:
        text = _to_json(data)
    except ValueError:  # NaN or Infinity: rare, and looking for them in all of an index takes longer than the rest
        text = _to_json(to_json_value(data))
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _to_json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)


def read_asset(name: str) -> str:
    """The text of an asset."""
    return (files("upshot.run.report") / "assets" / name).read_text("utf-8")
