"""Instruction following: which of a row's constraints a response keeps."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from upshot.errors import did_you_mean
from upshot.score import Reason, Score
from upshot.verifiers.base import Extra, Verifier, verifiers
from upshot.verifiers.constraint_checks import CHECKS, keeps

Constraint = tuple[str, dict[str, Any]]

_OLD: dict[str, tuple[str, dict[str, str]]] = {
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}),
    "verify_keyword_frequency": ("keywords:frequency", {"word": "keyword", "N": "frequency"}),
    "validate_forbidden_words": ("keywords:forbidden_words", {}),
    "verify_letter_frequency": ("keywords:letter_frequency", {"N": "let_frequency"}),
    "validate_response_language": ("language:response_language", {}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"N": "num_paragraphs"}),
    "validate_word_constraint": ("length_constraints:number_words", {"N": "num_words", "quantifier": "relation"}),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences",
        {"N": "num_sentences", "quantifier": "relation"},
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"N": "num_paragraphs", "i": "nth_paragraph"},
    ),
    "verify_postscript": ("detectable_content:postscript", {}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}),
    "validate_title": ("detectable_format:title", {}),
    "validate_choice": ("detectable_format:constrained_response", {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"N": "num_highlights"}),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"N": "num_sections", "section_splitter": "section_spliter"},
    ),
    "validate_json_format": ("detectable_format:json_format", {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"original_prompt": "prompt_to_repeat"}),
    "validate_two_responses": ("combination:two_responses", {}),
    "validate_uppercase": ("change_case:english_capital", {}),
    "validate_lowercase": ("change_case:english_lowercase", {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency",
        {"N": "capital_frequency", "quantifier": "capital_relation"},
    ),
    "validate_end": ("startend:end_checker", {}),
    "validate_quotation": ("startend:quotation", {}),
    "validate_no_commas": ("punctuation:no_comma", {}),
}
"""Function names of the older OLMo rows → IFEval ids and how their arguments are called there."""


def constraints_of(reference: Any, extra: Extra) -> list[Constraint]:
    """The constraints of a row: IFEval columns, a dictionary or JSON of them, or the older `func_name` form."""
    data = _decoded(reference)
    if isinstance(data, Sequence) and not isinstance(data, str) and data and isinstance(data[0], Mapping):
        return [constraint for item in data for constraint in constraints_of(item, {})]
    if not isinstance(data, Mapping) or not data:
        data = extra
    if "func_name" in data:
        return [_old_form(data)]
    names = data.get("instruction_id_list") or data.get("instruction_id") or data.get("instruction_ids") or []
    names = [names] if isinstance(names, str) else list(names)
    arguments = _decoded(data.get("kwargs")) or [{}] * len(names)
    arguments = [arguments] if isinstance(arguments, Mapping) else list(arguments)
    pairs = zip(names, arguments, strict=False)
    return [(name, {k: v for k, v in (given or {}).items() if v is not None}) for name, given in pairs]


def _old_form(data: Mapping[str, Any]) -> Constraint:
    name = str(data["func_name"])
    known, renamed = _OLD.get(name, (name, {}))
    return known, {renamed.get(k, k): v for k, v in data.items() if k != "func_name" and v is not None}


def _decoded(value: Any) -> Any:
    """A value that may be JSON or a Python literal in a string."""
    if not isinstance(value, str) or len(value) > 100_000:
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


@verifiers.register(
    "constraints", "ifeval", "google/IFEval", "allenai/IF_multi_constraints_upto5", "allenai/RLVR-IFeval"
)
class Constraints(Verifier):
    """1 when every constraint is kept; with `partial`, the share of those kept."""

    verdict_on = "whether the final answer keeps all constraints of the request"

    def __init__(self, mode: Literal["strict", "loose"] = "strict", partial: bool = False) -> None:
        """mode: loose also accepts the response without its first or last line, or without asterisks."""
        self.mode = mode
        self.partial = partial
        self.graded = partial

    def score(self, response: str, reference: Any, extra: Extra) -> Score:
        """The verdict; missing when the row has no constraint, or one that is not known."""
        wanted = constraints_of(reference, extra)
        if not wanted:
            return Score.missing(Reason.BAD_ROW, "constraints: none in the row")
        for name, _ in wanted:
            if name not in CHECKS:
                return Score.missing(
                    Reason.BAD_ROW, f"constraints: unknown kind '{name}'", hint=did_you_mean(name, CHECKS)
                )
        response = response[:200_000]
        variants = loose_variants(response) if self.mode == "loose" else [response]
        kept = [any(keeps(text, name, given) for text in variants) for name, given in wanted]
        broken = [name for (name, _), good in zip(wanted, kept, strict=True) if not good]
        value = sum(kept) / len(kept) if self.partial else float(all(kept))
        return Score(value, detail={"broken": broken})


def loose_variants(response: str) -> list[str]:
    """IFEval's loose readings: without the first line, the last line, both; each with and without asterisks."""
    lines = response.split("\n")
    texts = [response, "\n".join(lines[1:]), "\n".join(lines[:-1]), "\n".join(lines[1:-1])]
    return texts + [re.sub(r"\*", "", text) for text in texts]
