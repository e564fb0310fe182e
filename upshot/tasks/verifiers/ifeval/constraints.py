"""Instruction following: which of a row's constraints a response keeps."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from upshot.core.errors import did_you_mean
from upshot.core.score import Reason, Score
from upshot.tasks.verifiers.base import BadRow, Extra, Verifier, as_json_text, verifiers
from upshot.tasks.verifiers.ifeval.checks import IFEVAL
from upshot.tasks.verifiers.ifeval.languages import model
from upshot.tasks.verifiers.ifeval.olmo import OLD, OLMO, SAME

Constraint = tuple[str, dict[str, Any]]
CHECKS = IFEVAL | OLMO | OLD
"""All checks by the names of their constraints."""


def constraints_of(reference: Any, extra: Extra) -> list[Constraint]:
    """The constraints of a row: IFEval columns, a dictionary or JSON of them, or the older `func_name` form."""
    data = _decode(reference)
    if isinstance(data, Sequence) and not isinstance(data, str) and data:
        data = [_decode(item) for item in data]
    if isinstance(data, list) and data and isinstance(data[0], Mapping):
        return [constraint for item in data for constraint in constraints_of(item, {})]
    if not isinstance(data, Mapping) or not data:
        data = extra
    if "func_name" in data:
        name, renamed = SAME.get(str(data["func_name"]), (str(data["func_name"]), {}))
        return [(name, _drop_nulls({renamed.get(k, k): v for k, v in data.items() if k != "func_name"}))]
    names = data.get("instruction_id_list") or data.get("instruction_id") or data.get("instruction_ids") or []
    names = [names] if isinstance(names, str) else list(names)
    arguments = _decode(data.get("kwargs")) or [{}] * len(names)
    arguments = [arguments] if isinstance(arguments, Mapping) else list(arguments)
    if len(arguments) != len(names):
        raise BadRow(f"{len(names)} constraints but {len(arguments)} kwargs")
    return [(name, _drop_nulls(_decode(values) or {})) for name, values in zip(names, arguments, strict=True)]


def _drop_nulls(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if value is not None}


def _decode(value: Any) -> Any:
    """A value that may be JSON or a Python literal in a string."""
    if not isinstance(value, str) or len(value) > 100_000:
        return value
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return read(value)
    return value


@verifiers.register(
    "constraints", "ifeval", "google/IFEval", "allenai/IF_multi_constraints_upto5", "allenai/RLVR-IFeval"
)
class ConstraintsVerifier(Verifier):
    """1 when every constraint is kept; with `partial`, the share kept of those that can be checked."""

    verdict_on = "whether the final answer keeps all constraints of the request"

    def __init__(self, mode: Literal["strict", "loose"] = "strict", partial: bool = False) -> None:
        """mode: loose also accepts the response without its first or last line, or without asterisks."""
        self.mode = mode
        self.partial = partial
        self.graded = partial

    @classmethod
    def ground_truth(cls, reference: Any, extra: Extra) -> str:
        """The constraints in IFEval's columns."""
        wanted = constraints_of(reference, extra)
        unknown = next((name for name, _ in wanted if name not in CHECKS), None)
        if unknown is not None or not wanted:
            raise BadRow(f"unknown constraint '{unknown}'" if wanted else "no constraint")
        names, arguments = [name for name, _ in wanted], [values for _, values in wanted]
        return as_json_text({"instruction_id_list": names, "kwargs": arguments})

    def warm(self) -> None:
        """Load the model of languages: its half second must not be an item's."""
        model()

    def score(self, response: str, reference: Any, extra: Extra) -> Score:
        """The verdict; missing when the row has no constraint, or one that cannot be checked decides it."""
        try:
            wanted = constraints_of(reference, extra)
        except BadRow as error:
            return Score.missing(Reason.BAD_ROW, f"constraints: {error}")
        if not wanted:
            return Score.missing(Reason.BAD_ROW, "constraints: none in the row")
        response = response[:200_000]
        variants = loose_variants(response) if self.mode == "loose" else [response]
        kept: list[bool] = []
        broken: list[str] = []
        unknown: dict[str, Score] = {}
        for name, arguments in wanted:
            if name not in CHECKS:
                hint = did_you_mean(name, CHECKS)
                unknown[name] = Score.missing(Reason.BAD_ROW, f"constraints: unknown kind '{name}'", hint=hint)
                continue
            try:
                verdict = keeps_any(variants, name, arguments)
            except (TypeError, ValueError, AttributeError, LookupError) as error:  # wrong arguments
                if not self.partial:
                    raise
                unknown[name] = Score.missing(Reason.BAD_ROW, f"constraints: '{name}': {error}")
            else:
                if verdict is None:
                    unknown[name] = Score.missing(Reason.UNDECIDED, f"constraints: '{name}' does not show")
                else:
                    kept.append(verdict)
                    broken += [] if verdict else [name]
        if unknown and (not kept or (not self.partial and not broken)):  # what is known does not settle the row
            return next(iter(unknown.values()))
        value = sum(kept) / len(kept) if self.partial else float(all(kept))
        return Score(value, detail={"broken": broken} | ({"unknown": list(unknown)} if unknown else {}))


def keeps(text: str, name: str, arguments: Mapping[str, Any]) -> bool | None:
    """Whether a response keeps one constraint, None: it does not show. Arguments that the kind has not are ignored."""
    if not text.strip():
        return False
    known = inspect.signature(CHECKS[name]).parameters
    usable = {key: value for key, value in arguments.items() if key in known and value is not None}
    if lacking := [key for key, one in known.items() if one.default is one.empty and key not in ("text", *usable)]:
        raise TypeError(f"the constraint '{name}' lacks {', '.join(lacking)}")
    return CHECKS[name](text, **usable)


def keeps_any(variants: Sequence[str], name: str, arguments: Mapping[str, Any]) -> bool | None:
    """Whether one reading of a response keeps a constraint; None where none does and of one it does not show."""
    verdicts = [keeps(text, name, arguments) for text in variants]
    return True if True in verdicts else None if None in verdicts else False


def loose_variants(response: str) -> list[str]:
    """IFEval's loose readings: without the first line, the last line, both; each with and without asterisks."""
    lines = response.split("\n")
    texts = [response, "\n".join(lines[1:]), "\n".join(lines[:-1]), "\n".join(lines[1:-1])]
    return texts + [re.sub(r"\*", "", text) for text in texts]
