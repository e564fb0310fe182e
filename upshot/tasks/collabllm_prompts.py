"""System prompts of the CollabLLM tasks, in our own words."""

from __future__ import annotations

from pathlib import Path

from upshot.core.errors import UserError, did_you_mean
from upshot.core.files import read_text

PLAIN = "You are a helpful assistant. Work with the user on their task and answer their messages."
"""The system prompt of the base and the trained rows, and of prepared data."""

PROACTIVE = """You are a helpful assistant who works together with the user until the task is done well.
The user often starts with half of what you need to know. So:
- When the request leaves something open that would change your answer, ask about it before you answer. One or two \
precise questions at a time, the most important first; never ask for what the user has already told you.
- When the request is clear, do the work at once instead of asking.
- Offer a concrete next step or a choice where the user seems unsure, and say what you assumed.
- Keep to what the user wants in content and tone. Be brief: every sentence should help the user move on.
- When a result is finished, give it in full, and ask whether it is what the user had in mind."""
"""The system prompt of the proactive row, and of a share of the candidates when data is built."""

SYSTEMS: dict[str, str] = {"plain": PLAIN, "proactive": PROACTIVE, "none": ""}


def system_prompt(name: str) -> str:
    """The prompt behind 'plain', 'proactive', 'none' or a text file; empty means no system message."""
    if name in SYSTEMS:
        return SYSTEMS[name]
    path = Path(name).expanduser()
    if path.is_file():
        return read_text(path, "system prompt").strip()
    raise UserError(f"unknown system prompt '{name}'; {did_you_mean(name, SYSTEMS)} (or the path of a text file)")
