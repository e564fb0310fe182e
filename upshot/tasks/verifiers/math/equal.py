"""Whether two mathematical answers are the same, by their kinds and exact values.

Each answer is read as what it is (`reading`); things of different kinds are different: an equation, a relation or
a text about a number is not that number. Algebra (`algebra`) is asked only where both are of one kind and the values
inside are beyond `expressions`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate

from upshot.tasks.verifiers.math.answer import MAX_ANSWER
from upshot.tasks.verifiers.math.expressions import (
    MALFORMED,
    READABLE,
    PointValue,
    evaluate_at,
    may_be_number,
    same_value,
)
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
from upshot.tasks.verifiers.math.latex import canonical, closed_up
from upshot.tasks.verifiers.math.quantities import all_of
from upshot.tasks.verifiers.math.reading import choice_of, kind_of
from upshot.tasks.verifiers.math.sets import as_reals
from upshot.tasks.verifiers.math.units import unit_factor

_TOWER = re.compile(
    r"\^\s*(?:\{[^{}]{0,40}|\w)\^|\*\*\s*\(?[\w.]{1,40}\s*\*\*|\^\s*\{?\s*-?\d{4,}|\*\*\s*\(?-?\d{4,}|\d{400,}"
    r"|\)\s*\^\s*\{?\s*(?:[3-9]\d|\d{3,})|\d{4,}\s*\)?!"
)

_WORTHS = {("percent", ""): "/100", ("degree", ""): "*\\pi/180", ("degree", "radian"): "*\\pi/180"}
"""What a sign is worth beside a value without it: 50% is 50 and a half, 30° is 30 and π/6."""


def costly(answer: str, truth: str) -> bool:
    """Whether an answer is one that nobody writes and algebra would choke on."""
    if _TOWER.search(answer) and not _TOWER.search(truth):
        return True
    depths = accumulate(((character in "{([") - (character in "})]") for character in answer), initial=0)
    return max(depths) > 12 or answer.count("=") > 10 or answer.count("+") > 60


def quick_verdict(answer: str, truth: str) -> bool | None:
    """Equal or not where spelling, kinds and exact values settle it; None when mathematics is needed."""
    if answer.strip() == truth.strip():
        return bool(answer.strip())
    if len(answer) > MAX_ANSWER or len(truth) > 10 * MAX_ANSWER or costly(answer, truth):
        return False
    spelled = _drop_mark(answer)
    if not spelled or spelled == _drop_mark(truth):
        return bool(spelled)
    (chosen, alone), (choice, bare) = choice_of(answer), choice_of(truth)
    if chosen and choice and (chosen != choice or alone or bare):  # else what stands behind the letters counts too
        return chosen == choice
    return same_kind(kind_of(answer), kind_of(truth))


def _drop_mark(answer: str) -> str:
    """An answer as it is seen: without spaces and without the marks of texts."""
    return closed_up(re.sub("[⟪⟫]", " ", canonical(answer)).strip())


def same_kind(answer: Kind, wanted: Kind) -> bool | None:
    """Whether an answer is the wanted thing; None when mathematics is needed to tell."""
    if isinstance(wanted, Chain):
        return same_kind(answer, wanted.items[-1])
    if isinstance(answer, Chain):
        last = answer.items[-1]
        return all_of([same_kind(last, wanted), *(_same_step(item, last) for item in answer.items[:-1])])
    if isinstance(answer, Value) and isinstance(wanted, Value):
        return _same_named(answer, wanted)
    if isinstance(answer, Words) or isinstance(wanted, Words):
        return _spelling(answer) == _spelling(wanted)
    for kind, compare in _COMPARISONS.items():
        if isinstance(answer, kind) or isinstance(wanted, kind):
            return compare(answer, wanted)
    if isinstance(answer, Opaque) and isinstance(wanted, Opaque):
        return None if "⟪" not in answer.text + wanted.text else _spoken_text(answer.text) == _spoken_text(wanted.text)
    return _same_set(answer, wanted)


def _same_step(item: Kind, last: Kind) -> bool | None:
    """Whether a step of a chain comes to its end; a step may be arithmetic."""
    if isinstance(item, Value) and isinstance(last, Value):
        return same_value(item.text, last.text)
    return same_kind(item, last)


def _spelling(kind: Kind) -> str:
    text = kind.text if isinstance(kind, Words | Value) and not getattr(kind, "unit", "") else "?" + repr(kind)
    text = text.strip("()")
    return text if len(text) == 1 else text.lower()


def _spoken_text(text: str) -> str:
    return re.sub(r"[⟪⟫]|(?<=[a-z])\.|(?<=[a-z.⟫]) | (?=[a-z⟪])", "", text.lower())


def _same_named(answer: Value, wanted: Value) -> bool | None:
    if answer.name and wanted.name and answer.name != wanted.name and not _letters(wanted.text):
        return False
    if answer.base or wanted.base:
        return _same_digits(answer, wanted)
    if _is_refused(answer.text, wanted.text):
        return False
    factor = unit_factor(answer.unit, wanted.unit)
    scaled = f"({answer.text})*({factor})" if factor not in (None, 1) else answer.text
    verdict = False if factor is None else same_value(scaled, wanted.text)
    if verdict is None and (answer.name == wanted.text or wanted.name == answer.text):
        return False  # a_n = xy is not a_n, though algebra may take either side
    for one, other in ((answer, wanted), (wanted, answer)):
        if worth := _WORTHS.get((one.unit, other.unit)):
            return verdict or same_value(f"({one.text}){worth}", other.text)
    if verdict is False and answer.name and wanted.name and not answer.unit and not wanted.unit:
        return bool(_same_zeros(answer, wanted))  # x = 2y and y = x/2
    return verdict


def _same_digits(answer: Value, wanted: Value) -> bool | None:
    """Digits in a base: it may be left out where the reference says it, but 17 in base 8 is not 17."""
    if {answer.base, wanted.base} <= {0, 10}:
        return False if _is_refused(answer.text, wanted.text) else same_value(answer.text, wanted.text)
    if answer.base not in (wanted.base, 0):
        return False
    return answer.text.lstrip("0") == wanted.text.lstrip("0")


def _letters(text: str) -> bool:
    value = evaluate_at(text)
    return isinstance(value, PointValue) and value.letters


def _is_refused(answer: str, wanted: str) -> bool:
    """Whether an answer is not of the reference's kind, even if its value is equal."""
    if _commands(answer) - READABLE - _commands(wanted) or ("!" in answer and "!" not in wanted and "!!" in answer):
        return True  # something left to do: an integral, a maximum, a floor
    first, second = evaluate_at(answer), evaluate_at(wanted)
    if first == MALFORMED:
        return True
    if not isinstance(first, PointValue):
        return isinstance(second, PointValue) and not second.letters and not may_be_number(answer)
    if not isinstance(second, PointValue):
        return first.undone and second is None and not re.search(r"[-+*/]|\\cdot|\\times", wanted)
    return not second.letters and (first.letters or (first.undone and not second.undone))


def _commands(text: str) -> set[str]:
    return set(re.findall(r"\\([a-zA-Z]+)", text))


def _same_equation(answer: Kind, wanted: Kind) -> bool | None:
    """Equations are the same when one is the other times a number; `3x = 12` is not a solution."""
    if isinstance(wanted, Value) and not (wanted.name and _letters(wanted.text)):
        return False
    return _same_zeros(answer, wanted)


def _same_zeros(answer: Kind, wanted: Kind) -> bool | None:
    """Whether one difference of two sides is the other times a number."""
    first, second = _difference(answer), _difference(wanted)
    if first is None or second is None:
        return False
    pairs = [(evaluate_at(first, point), evaluate_at(second, point)) for point in ("first", "second", "negative")]
    if not all(isinstance(value, PointValue) and value.value for pair in pairs for value in pair):
        return None
    ratios = [one.value / other.value for one, other in pairs]  # type: ignore[union-attr, operator]
    return all(abs(complex(ratio - ratios[0])) <= 1e-9 * abs(complex(ratio)) for ratio in ratios[1:])


def _difference(kind: Kind) -> str | None:
    if isinstance(kind, Equation):
        return f"({kind.left})-({kind.right})"
    return f"({kind.name})-({kind.text})" if isinstance(kind, Value) and kind.name else None


def _same_ratio(answer: Kind, wanted: Kind) -> bool | None:
    """3 : 4 is 6 : 8 and, of two, the fraction."""
    if isinstance(answer, Ratio) and isinstance(wanted, Ratio):
        (first, *rest), (other, *others) = answer.parts, wanted.parts
        if len(rest) != len(others):
            return False
        return all_of(same_value(f"({a})*({other})", f"({b})*({first})") for a, b in zip(rest, others, strict=True))
    one, two = _as_fraction(answer), _as_fraction(wanted)
    return _same_named(one, two) if isinstance(one, Value) and isinstance(two, Value) else False


def _as_fraction(kind: Kind) -> Kind:
    two = isinstance(kind, Ratio) and len(kind.parts) == 2
    return Value("\\frac{{{}}}{{{}}}".format(*kind.parts)) if two else kind  # type: ignore[union-attr]


def _same_matrix(answer: Kind, wanted: Kind) -> bool | None:
    """Cell by cell; a row or column is the vector in brackets."""
    both = (answer, wanted)
    vector = any(isinstance(kind, Matrix) and kind.is_vector for kind in both)
    flat = vector or any(isinstance(kind, Collection) for kind in both)
    if vector and any(isinstance(kind, Collection) and kind.brackets != "()" for kind in both):
        return False  # [2,4] is an interval
    one, two = _as_matrix(answer, flat), _as_matrix(wanted, flat)
    if one is None or two is None:
        return False
    if [len(row) for row in one.rows] != [len(row) for row in two.rows]:
        return False
    pairs = [(a, b) for row, other in zip(one.rows, two.rows, strict=True) for a, b in zip(row, other, strict=True)]
    if not one.factor and not two.factor:
        return all_of(same_kind(a, b) for a, b in pairs)
    return all_of(_same_multiple(a, one.factor, b, two.factor) for a, b in pairs)


def _as_matrix(kind: Kind, flat: bool) -> Matrix | None:
    """A matrix, or a vector as its one row; `flat`: a column, too."""
    if isinstance(kind, Collection) and kind.brackets in ("()", "[]"):
        return Matrix((kind.items,))
    if not isinstance(kind, Matrix):
        return None
    column = flat and all(len(row) == 1 for row in kind.rows)
    return Matrix((tuple(cell for row in kind.rows for cell in row),), kind.factor) if column else kind


def _same_multiple(answer: Kind, factor: str, wanted: Kind, other: str) -> bool | None:
    """Whether two cells are the same, each times what stands before its matrix."""
    if not (isinstance(answer, Value) and isinstance(wanted, Value)):
        return None
    cell = evaluate_at(answer.text)
    if isinstance(cell, PointValue) and cell.undone:
        return False
    return same_value(f"({factor or 1})*({answer.text})", f"({other or 1})*({wanted.text})")


def _same_assignments(answer: Kind, wanted: Kind) -> bool | None:
    """x = 1, y = 2 is the point (1, 2)."""
    if isinstance(answer, Assignments) and isinstance(wanted, Assignments):
        if [name for name, _ in answer.items] != [name for name, _ in wanted.items]:
            return False
        return all_of(same_kind(a, b) for (_, a), (_, b) in zip(answer.items, wanted.items, strict=True))
    one, other = (answer, wanted) if isinstance(answer, Assignments) else (wanted, answer)
    if not isinstance(one, Assignments) or not isinstance(other, Collection) or other.brackets != "()":
        return False
    return _in_order([_drop_name(kind) for _, kind in one.items], other.items)


def _drop_name(kind: Kind) -> Kind:
    return Value(kind.text, kind.unit) if isinstance(kind, Value) else kind


def _same_set(answer: Kind, wanted: Kind) -> bool | None:
    if isinstance(answer, Collection) and isinstance(wanted, Collection):
        loose = ("", "⦃⦄")
        if answer.brackets in loose and wanted.brackets in loose:
            once = answer.brackets == "⦃⦄" and len(answer.items) > len(wanted.items)
            return _in_any_order(_distinct(answer.items) if once else answer.items, wanted.items)
        verdict = _in_order(answer.items, wanted.items) if answer.brackets == wanted.brackets else False
        if verdict is not None or as_reals(answer) is None:
            return verdict
    for one, other in ((answer, wanted), (wanted, answer)):  # a set of one is its member
        if isinstance(one, Value) and isinstance(other, Collection) and other.brackets == "⦃⦄":
            return _in_any_order([answer] if one is answer else other.items, other.items if one is answer else [wanted])
    first, second = as_reals(answer), as_reals(wanted)
    variables = {kind.variable for kind in (answer, wanted) if isinstance(kind, Reals) and kind.variable}
    if first is None or second is None or len(variables) > 1:
        return False
    return first.same(second)


def _distinct(items: Sequence[Kind]) -> list[Kind]:
    """What a set has, each once, however often it is named."""
    out: list[Kind] = []
    for item in items:
        if not any(item == other or same_kind(item, other) for other in out):
            out.append(item)
    return out


def _in_order(items: Sequence[Kind], others: Sequence[Kind]) -> bool | None:
    return all_of(same_kind(a, b) for a, b in zip(items, others, strict=True)) if len(items) == len(others) else False


def _in_any_order(items: Sequence[Kind], others: Sequence[Kind]) -> bool | None:
    left = list(others)
    if len(items) != len(left):
        return False
    for item in items:
        verdicts = [True if item == other else same_kind(_drop_name(item), _drop_name(other)) for other in left]
        if True not in verdicts:
            return None if None in verdicts else False
        left.pop(verdicts.index(True))
    return True


_COMPARISONS: dict[type, Callable[[Kind, Kind], bool | None]] = {
    Equation: _same_equation,
    Ratio: _same_ratio,
    Matrix: _same_matrix,
    Assignments: _same_assignments,
}
"""How two things are compared of which one at least is of this kind; the first that fits counts."""
