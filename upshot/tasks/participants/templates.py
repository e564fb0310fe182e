"""Texts for models: prompt templates (files beside this one, or your own by path), and conversations as lines.

A speaker's words cannot pose as somebody else's in a prompt: a line that begins like another speaker's is quoted
(`> User: …`), and a value between tags cannot close its tag (`</conversation>` becomes `<\\/conversation>`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from upshot.core.conversation import Conversation, Message
from upshot.core.errors import UserError, did_you_mean
from upshot.core.files import read_text

FOLDER = Path(__file__).parent / "prompts"
NAMES = {"user": "User", "assistant": "Assistant", "tool": "Tool"}


def render(name: str, **values: Any) -> str:
    """The text of a template: a name such as `user` or the path of a file that ends in .j2."""
    template, tags = _compile(name)
    closed = {
        value: re.sub(rf"<\s*/(?=\s*{tags[value]}\b)", r"<\\/", str(values[value]), flags=re.I)
        for value in tags.keys() & values
    }
    return str(template.render(**values | closed)).strip()


def template_source(name: str) -> str:
    """The unrendered text of a template."""
    path = Path(name) if name.endswith(".j2") else FOLDER / f"{name}.j2"
    if not path.is_file():
        known = [file.stem for file in FOLDER.glob("*.j2")]
        raise UserError(f"no prompt template '{name}'; {did_you_mean(name, known)} (your own: a path ending in .j2)")
    return read_text(path, "prompt template")


@lru_cache(maxsize=64)
def _compile(name: str) -> tuple[Any, dict[str, str]]:
    """A template, and the tag around each of its values that stands between tags."""
    from jinja2 import Environment, StrictUndefined

    # Values are data, never templates: what a model says is not rendered again.
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    source = template_source(name)
    enclosed = re.findall(r"<(\w+)>\s*\{\{\s*(\w+)\s*\}\}", source)
    return environment.from_string(source), {value: tag for tag, value in enclosed}


def as_lines(messages: Sequence[Message], names: Mapping[str, str] = NAMES) -> str:
    """Who said what, a paragraph each; system messages are left out."""
    other = re.compile(rf"\n(?=[\W_]{{0,9}}(?:{'|'.join(names.values())})\W{{0,5}}[:：])", re.IGNORECASE)
    spoken = [(names.get(m.role, m.role), m.content.strip()) for m in messages if m.role != "system"]
    return "\n\n".join(f"{name}: " + other.sub("\n> ", text) for name, text in spoken)


def as_text(value: Any) -> str:
    """A goal or a reference as text: messages as lines, other structures as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(v, Message) for v in value):
        return as_lines(value)
    if isinstance(value, list | tuple) and value and all(isinstance(v, Mapping) and "role" in v for v in value):
        return as_lines([Message.from_dict(v) for v in value])
    return json.dumps(value, ensure_ascii=False, default=str)


def task_of(conversation: Conversation, fallback: str) -> str:
    """What the conversation is about: the row's `task_desc`, if it has one."""
    return str(conversation.row.meta.get("task_desc") or fallback)
