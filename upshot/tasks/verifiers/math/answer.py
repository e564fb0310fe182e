"""The answer in a mathematical reply. Pure and linear in the text."""

from __future__ import annotations

import re

MAX_REPLY = 200_000
MAX_ANSWER = 1_000
"""A longer final answer is compared by string equality only: no exam has one, and parsing it takes seconds."""
_DEEPEST = 8
"""Boxes inside each other that are opened."""

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*")
_MINERVA = re.compile(
    r"[Ff]inal [Aa]nswer(?: is|:)\s*:?\s*(.{1,400}?)(?:\.?\s*I hope it is correct|\.?\s*$|\.\s)", re.S
)
_ANSWER_IS = re.compile(r"(?:[Tt]he\s+)?(?:[Aa]nswer|ANSWER)\s*(?:is|:|=)\s*:?\s*(.{1,300}?)(?:\.\s|\.?\s*$|\n)", re.S)
_REASON = re.compile(r",?\s(?:since|because|which)\s.*", re.S)
_INLINE = re.compile(r"\$\$?([^$]{1,500})\$\$?|\\\((.{1,500}?)\\\)|\\\[(.{1,500}?)\\\]", re.S)
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|-?\.\d+")
_JOIN = re.compile(r"[\s$]*(?:[,;/]|[,;]?[\s$]*(?:\\text\s*\{)?\s*(?:and|or)\s*\}?)[\s$]*")
_BOLD = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])")
"""Marks of bold words; 2**3 has none."""


def boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, stop, content) of every \\boxed{…}, by matching braces; an unclosed box is left out."""
    out: list[tuple[int, int, str]] = []
    position = 0
    while match := _BOX.search(text, position):
        position = match.end()
        if text[position : position + 1] == "{":
            stop = _closing(text, position)
            if stop is None:
                break  # nothing after an unclosed box can be closed inside it either: keeps the scan linear
            out.append((match.start(), stop, text[position + 1 : stop - 1]))
            position = stop
        elif bare := re.match(r"-?[\w.,/]+", text[position : position + 40]):
            out.append((match.start(), position + bare.end(), bare[0]))
    return out


def _closing(text: str, opening: int) -> int | None:
    depth = 0
    for brace in re.finditer(r"\\?[{}]", text[opening:]):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return opening + brace.end()
    return None


def boxed_answer(text: str) -> str | None:
    """The content of the last box; boxes joined by a comma, a slash, 'and' or 'or' at the end count as one list."""
    every_box = boxes(text)
    if not every_box:
        return None
    parts = [_unbox(every_box[-1][2])]
    for (_, stop, content), (start, _, _) in zip(every_box[-2::-1], every_box[:0:-1], strict=False):
        if start - stop > 40 or not _JOIN.fullmatch(text[stop:start]):
            break
        parts.append(_unbox(content))
    return ", ".join(reversed(parts))


def _unbox(content: str) -> str:
    """The content of a box without the boxes inside it: a box around a box says nothing."""
    for _ in range(_DEEPEST):
        inner = boxes(content)
        for start, stop, inside in reversed(inner):
            content = content[:start] + inside + content[stop:]
        if not inner:
            break
    return content


def final_answer(text: str, boxed_only: bool = False) -> str | None:
    """The answer of a reply: the box, else 'final answer is …' (Minerva), else the last expression or number."""
    text = text[-MAX_REPLY:]
    boxed = boxed_answer(text)
    if boxed is not None or boxed_only:
        return boxed
    tail = _BOLD.sub("", text[-4000:])
    for pattern in (_MINERVA, _ANSWER_IS):
        if stated := list(pattern.finditer(tail)):
            return _REASON.sub("", stated[-1][1]).strip()
    if inline := list(_INLINE.finditer(tail)):
        return next(group for group in inline[-1].groups() if group is not None)
    numbers = _NUMBER.findall(tail)
    return numbers[-1] if numbers else None
