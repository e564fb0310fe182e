"""What kind of thing a mathematical answer is: a value, a collection, a set of reals, an equation, a matrix, words.

`kind_of` reads a canonical answer (see `latex`) by its outermost structure and leaves the values inside as texts.
Text that says something about the answer, relations it does not understand and the like are `Opaque`: equal only to
the same spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

from upshot.tasks.verifiers.math.expressions import PointValue, evaluate_at
from upshot.tasks.verifiers.math.kinds import (
    Assignments,
    Chain,
    Collection,
    Equation,
    Kind,
    Matrix,
    Opaque,
    Ratio,
    Reals,
    Value,
    Words,
)
from upshot.tasks.verifiers.math.latex import NEW_ROW, canonical, closed_up, top_level
from upshot.tasks.verifiers.math.names import NAME, letters, own_letters
from upshot.tasks.verifiers.math.real_sets import ALL, EMPTY
from upshot.tasks.verifiers.math.sets import LETTER, combine_sets, conditions, inequality
from upshot.tasks.verifiers.math.units import split_unit

_JOIN = re.compile(r"[,;]?(?:⟪(?:and|or)⟫|\\lor(?![a-z])|\\land(?![a-z]))|[,;]")
_RELATION = re.compile(
    r"\\(?:le|ge|ne|approx|in|equiv|sim|cong|subset|subseteq|perp|parallel|to|mapsto)(?![a-z])|[=<>]"
)
_SET_OPERATOR = re.compile(r"\\(?:cup|cap|setminus)(?![a-z])")
_SCALED = re.compile(
    r"(?P<before>.*?)(?:\\(?:cdot|times) ?|\*)?"  # what it is times, if anything
    r"(?:[(\[]?\\begin\{(?P<form>matrix|array)\}(?:\{[^{}]*\})?(?P<cells>(?:(?!\\begin).)*)\\end\{(?P=form)\}[)\]]?"
    r"|(?P<vector>\([^()]*,[^()]*\)))"
    r"(?:/(?P<below>\d+(?:\.\d+)?|\\sqrt\{\d+\}))?"
)
_ROW_END = re.compile(rf"{NEW_ROW}(?:\[[\d.]+[a-z]{{2}}\])?")
_COLON = re.compile(":|⟪to⟫")
_ANGLES = re.compile(r"<([^<>=]*,[^<>=]*)>")
_BASE = re.compile(r"\(?([0-9A-F]+)\)?_(?:\{(\d{1,2})\}|(\d))")
_BARE_JOIN = re.compile(r"⟪[^⟪⟫]*⟫|(?<![a-zA-Z\\])(and|or)(?![a-zA-Z])")
_FRENCH = re.compile(r"([\]\[(])([^\[\]()]*,[^\[\]()]*)([\[\])])")
_SIGNS = {"": "", "+": "", "-": "-1"}
"""What stands before a matrix that is times one, or minus one."""
_SAID_SETS = {
    **dict.fromkeys(("no solution", "no solutions", "no real solution", "no real solutions", "empty set"), EMPTY),
    **dict.fromkeys(("all real numbers", "all reals"), ALL),
}


@lru_cache(maxsize=8192)
def kind_of(answer: str) -> Kind:
    """What an answer is."""
    text = _BARE_JOIN.sub(lambda m: f"⟪{m[1]}⟫" if m[1] else m[0], canonical(answer))
    dressed = split_unit(text)
    if dressed is None:
        return Opaque(closed_up(text))
    body = closed_up(dressed.body)
    kind = _read(f"({vector[1]})" if (vector := _ANGLES.fullmatch(body)) else body)
    if not dressed.unit:
        return kind
    if isinstance(kind, Value) and not kind.base:
        return Value(kind.text, dressed.unit, name=kind.name)
    if isinstance(kind, Chain) and isinstance(kind.items[-1], Value):
        return Chain((*kind.items[:-1], Value(kind.items[-1].text, dressed.unit)))
    return Opaque(closed_up(text)) if dressed.unit in ("percent", "dollar", "euro") else kind


def choice_of(answer: str) -> tuple[str, bool]:
    """The letter of a choice in an answer, if any, and whether it is all there is: `(C)`, but not `(C) 12`."""
    text = canonical(answer)
    alone = re.fullmatch(r"⟪?\(?([A-J])\)?⟫?", text)
    dressed = None if alone else split_unit(text)
    return (alone[1], True) if alone else (dressed.label if dressed else "", False)


def _read(text: str, depth: int = 0) -> Kind:
    if not text or depth > 8:
        return Opaque(text)
    if spoken := _words(text):
        return spoken
    pieces = top_level(text, _JOIN)
    if len(pieces) > 1:
        return _several(pieces[::2], pieces[1::2], depth)
    sides = top_level(text, _RELATION)
    if len(sides) > 1:
        return _read_relation(sides[::2], sides[1::2], depth)
    parts = top_level(text, _SET_OPERATOR)
    if len(parts) > 1:
        return combine_sets([_read(part, depth + 1) for part in parts[::2]], parts[1::2]) or Opaque(text)
    terms = top_level(text, _COLON)[::2]
    if len(terms) > 1:
        return Ratio(tuple(terms)) if all(map(_is_plain, terms)) else Opaque(text)
    return _single(text, depth)


def _is_plain(text: str) -> bool:
    return isinstance(evaluate_at(text), PointValue)


def _words(text: str) -> Words | Reals | None:
    if re.fullmatch(r"(?:⟪[^⟪⟫]*⟫)+", text):
        spoken = " ".join(re.findall(r"[^⟪⟫]+", text))
    elif re.fullmatch(r"[a-zA-Z]{4,}|(?i:yes|no|odd)|\(?[A-Z]\)", text):
        spoken = text
    else:
        return None
    spoken = " ".join(re.sub(r"[^\w\s]", " ", spoken).split())
    spoken = spoken if len(spoken) == 1 else spoken.lower()
    return Reals(_SAID_SETS[spoken]) if spoken in _SAID_SETS else Words(spoken)


def _single(text: str, depth: int) -> Kind:
    if text == "\\R":
        return Reals(ALL)
    if text in ("\\emptyset", "⦃⦄"):
        return Reals(EMPTY)
    if scaled := _read_scaled(text, depth):
        return scaled
    if base := _BASE.fullmatch(text):
        return Value(base[1], base=int(base[2] or base[3]))
    if french := _FRENCH.fullmatch(text):
        opening, closing = "(" if french[1] == "]" else french[1], ")" if french[3] == "[" else french[3]
        text = f"{opening}{french[2]}{closing}"
    if text[0] in "([⦃" and text[-1] in ")]⦄" and _encloses(text):
        return _read_enclosed(text, depth) or (_read(text[1:-1], depth + 1) if ":" in text else Value(text))
    if "\\pm" in text and text.count("\\pm") == 1 and "\\mp" not in text:
        both = (text.replace("\\pm", "+", 1).removeprefix("+"), text.replace("\\pm", "-", 1))
        return Collection("", tuple(_read(one.strip(), depth + 1) for one in both))
    return Opaque(text) if "⟪" in text or text.count("|") % 2 or ":" in text else Value(text)


def _read_scaled(text: str, depth: int) -> Matrix | None:
    """A matrix, or a vector in brackets with a number before it or below it."""
    scaled = _SCALED.fullmatch(text)
    if not scaled or not _is_factor(scaled["before"]):
        return None
    factor = _SIGNS.get(scaled["before"], scaled["before"])
    if scaled["below"]:
        if not re.search("[1-9]", scaled["below"]):
            return None
        factor = f"({factor or 1})/{scaled['below']}"
    if scaled["vector"] is None:
        rows = [row for row in _ROW_END.split(scaled["cells"]) if row.strip()]
        return Matrix(tuple(tuple(_read(cell, depth + 1) for cell in row.split("&")) for row in rows), factor)
    vector = _read_enclosed(scaled["vector"], depth) if factor else None
    number = evaluate_at(factor)
    if not isinstance(vector, Collection) or not isinstance(number, PointValue) or number.letters:  # f(1,2)
        return None
    return Matrix((vector.items,), factor, is_vector=True)


def _is_factor(text: str) -> bool:
    """Whether a text before a matrix is all times it: a sign or a product, but not the sum `3-1`."""
    return text in _SIGNS or (_is_plain(text) and len(top_level(text[1:], re.compile("[-+]"))) == 1)


def _encloses(text: str) -> bool:
    """Whether the first bracket is closed by the last."""
    levels = accumulate((character in "([{⦃") - (character in ")]}⦄") for character in text)
    return next((position for position, level in enumerate(levels) if level == 0), None) == len(text) - 1


def _read_enclosed(text: str, depth: int) -> Kind | None:
    """A collection or a set given by its condition; None for brackets around one value."""
    inside = text[1:-1]
    if text[0] == "⦃" and (described := re.fullmatch(r"(\w)(?:\\in\\R)?[|:](.+)", inside)):
        members = _read(described[2], depth + 1)
        return members if isinstance(members, Reals) else Opaque(text)
    items = top_level(inside, re.compile("[,;]"))[::2]
    if len(items) < 2 and text[0] != "⦃":
        return None
    return Collection(text[0] + text[-1], _flat(_read(item, depth + 1) for item in items))


def _flat(kinds: Iterable[Kind]) -> tuple[Kind, ...]:
    """Things with the items of plain lists among them (`\\pm 2`) in their place."""
    nested = (kind.items if isinstance(kind, Collection) and not kind.brackets else (kind,) for kind in kinds)
    return tuple(item for items in nested for item in items)


def _several(pieces: list[str], joins: list[str], depth: int) -> Kind:
    read = [_read(piece, depth + 1) for piece in pieces]
    if all(isinstance(kind, Reals) and kind.variable for kind in read):
        return conditions([kind for kind in read if isinstance(kind, Reals)], joins)
    names = [_assigned_name(piece) for piece in pieces]
    subjects = {name and re.sub("_.*", "", name) for name in names}
    if all(names) and len(subjects) == len(names):
        return Assignments(tuple(sorted(zip(map(str, names), read, strict=True), key=lambda item: item[0])))
    return Collection("", _flat(read))


def _assigned_name(piece: str) -> str | None:
    left, equals, right = piece.partition("=")
    return next((side for side in (left, right) if equals and NAME.fullmatch(side)), None)


def _read_relation(sides: list[str], relations: list[str], depth: int) -> Kind:
    whole = "".join(a + b for a, b in zip(sides, [*relations, ""], strict=True))
    if not all(sides[1:]) or (not sides[0] and relations[0] != "\\approx"):
        return Opaque(whole)
    if set(relations) <= {"=", "\\approx"}:
        return _equal(sides, relations, depth) or Opaque(whole)
    if relations == ["\\in"] and re.fullmatch(rf"{LETTER.pattern}|\([a-z,]+\)", sides[0]):
        kind = _read(sides[1], depth + 1)
        inside = Collection("⦃⦄", kind.items) if isinstance(kind, Collection) and kind.brackets == "⦃⦄" else kind
        return Opaque(whole) if isinstance(inside, Value | Words) else inside
    return inequality(sides, relations) or Opaque(whole)


def _equal(sides: list[str], relations: list[str], depth: int) -> Kind | None:
    """A value with its name, or an equation; of `a = b ≈ c` what stands before the ≈."""
    if "\\approx" in relations:
        at = relations.index("\\approx")
        exact = sides[: at + 1]
        if len(exact) == 1 and (not exact[0] or NAME.fullmatch(exact[0])):
            exact, at = [exact[0] or "x", *sides[1:2]], at + 1
        if not all(relation == "\\approx" for relation in relations[at:]) or len(exact) == 1:
            return _read(exact[0], depth + 1) if len(exact) == 1 else None
        sides = exact
    if len(sides) == 2 and not NAME.fullmatch(sides[0]) and NAME.fullmatch(sides[1]):
        sides = sides[::-1]  # 3 = x
    name, *values = sides
    tuple_name = re.fullmatch(r"\([a-zA-Z](?:,[a-zA-Z])+\)", name)
    if not (NAME.fullmatch(name) or tuple_name):
        return Equation(*sides) if len(sides) == 2 else None
    read = [_read(value, depth + 1) for value in values]
    last = read[-1]
    if len(read) > 1:
        return Chain(tuple(read))
    if not tuple_name and isinstance(last, Value) and not last.base:
        if own_letters(name) & letters(last.text):  # x = 2x, which is not solved
            return Equation(*sides)
        return Value(last.text, last.unit, name=name)
    return None if isinstance(last, Opaque) else last
