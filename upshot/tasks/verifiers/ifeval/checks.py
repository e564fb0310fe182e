"""Instruction-following checks, one small function a kind, with the public IFEval names and argument names.

A check takes the response and the constraint's keyword arguments and says whether it is kept, or None where that does
not show. All are linear in the response. What IFEval leaves to a library is done by simple rules here (sentences) or by
another one (`languages`).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from upshot.tasks.verifiers.ifeval.languages import is_language

Check = Callable[..., bool | None]
Kind = TypeVar("Kind", bound=Check)
CHECKS: dict[str, Check] = {}
"""Checks by IFEval instruction id."""


def check(name: str) -> Callable[[Kind], Kind]:
    """Decorator: make a check known by its id."""

    def add(function: Kind) -> Kind:
        CHECKS[name] = function
        return function

    return add


def compare(count: int, relation: str | None, limit: int) -> bool:
    """IFEval's relations: 'at least' (also the default), 'less than', and 'at most', 'exactly', 'more than'."""
    relation = (relation or "at least").strip().lower()
    if relation == "less than":
        return count < limit
    if relation in ("at most", "no more than"):
        return count <= limit
    if relation in ("exactly", "equal to"):
        return count == limit
    if relation == "more than":
        return count > limit
    if relation == "at least":
        return count >= limit
    raise ValueError(f"unknown relation '{relation}'")


def words(text: str) -> list[str]:
    """The words of a text; `don't` and `well-known` are one each."""
    return re.findall(r"\w+(?:['’-]\w+)*", text)


def occurrences(text: str, keyword: str) -> int:
    """How often a keyword occurs in any case, inside words too: IFEval finds `run` in `running`."""
    return len(re.findall(re.escape(keyword.strip()), text, re.IGNORECASE)) if keyword.strip() else 0


def sentences(text: str) -> list[str]:
    """The sentences of a text; common abbreviations, decimals and the ends of lines do not end one."""
    guarded = re.sub(r"\b(Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No|Fig)\.", lambda m: m[0].replace(".", "\x00"), text)
    parts = re.split(r"(?<=[.!?。！？])[\"'”’)]*\s+|(?<=[。！？])", guarded)
    return [part for part in parts if part and re.search(r"\w", part)]


def has_word(text: str, phrase: str) -> bool:
    """Whether a word or phrase occurs, on word boundaries, in any case."""
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None


@check("keywords:existence")
def existence(text: str, keywords: Sequence[str]) -> bool:
    """All keywords occur, inside words too."""
    return all(occurrences(text, word) for word in keywords)


@check("keywords:frequency")
def frequency(text: str, keyword: str, frequency: int, relation: str | None = None) -> bool:
    """A keyword occurs so often, inside words too."""
    return compare(occurrences(text, keyword), relation, frequency)


@check("keywords:forbidden_words")
def forbidden(text: str, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs."""
    return not any(has_word(text, word) for word in forbidden_words)


@check("keywords:letter_frequency")
def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str | None = None) -> bool:
    """A letter occurs so often, in either case."""
    return compare(text.lower().count(letter.lower()), let_relation, let_frequency)


@check("language:response_language")
def response_language(text: str, language: str) -> bool | None:
    """The response is in a language, given by its ISO code."""
    return is_language(text, language)


@check("length_constraints:number_sentences")
def number_sentences(text: str, num_sentences: int, relation: str | None = None) -> bool:
    """So many sentences."""
    return compare(len(sentences(text)), relation, num_sentences)


@check("length_constraints:number_words")
def number_words(text: str, num_words: int, relation: str | None = None) -> bool:
    """So many words, where `don't` is two, as IFEval counts."""
    return compare(len(re.findall(r"\w+", text)), relation, num_words)


@check("length_constraints:number_paragraphs")
def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """So many paragraphs, separated by `***`."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[1:-1] if len(parts) > 2 else []
    return all(inner) and len([part for part in parts if part]) == num_paragraphs


@check("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """So many paragraphs, separated by blank lines, and the n-th starts with a word; `two's` starts with `two`."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    found = words(parts[nth_paragraph - 1].lower())
    return bool(found) and first_word.lower() in (found[0], re.split("['’]", found[0])[0])


@check("detectable_content:number_placeholders")
def number_placeholders(text: str, num_placeholders: int) -> bool:
    """At least so many [placeholders]."""
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders


@check("detectable_content:postscript")
def postscript(text: str, postscript_marker: str = "P.S.") -> bool:
    """The postscript marker occurs: its letters with their full stops, perhaps with spaces between."""
    letters = [letter for letter in re.split(r"[.\s]+", postscript_marker) if letter]
    spaced = r"\.\s?".join(map(re.escape, letters)) + (r"\." if postscript_marker.strip().endswith(".") else "")
    return re.search(rf"(?<!\w){spaced}", text, re.IGNORECASE) is not None


@check("detectable_format:number_bullet_lists")
def number_bullets(text: str, num_bullets: int) -> bool:
    """Exactly so many lines that start with - or a single *."""
    return len(re.findall(r"^[^\S\n]*(?:\*[^*\n]|-)", text, re.MULTILINE)) == num_bullets


@check("detectable_format:constrained_response")
def constrained_response(text: str, options: Sequence[str] | None = None) -> bool:
    """One of the allowed answers occurs."""
    return any(option in text for option in options or [f"My answer is {x}." for x in ("yes", "no", "maybe")])


@check("detectable_format:number_highlighted_sections")
def highlights(text: str, num_highlights: int) -> bool:
    """At least so many *highlighted* parts."""
    double = re.findall(r"\*\*[^\n*]*\*\*", text)
    single = re.findall(r"\*[^\n*]*\*", text)
    return len([part for part in double + single if part.strip("* ")]) >= num_highlights


@check("detectable_format:multiple_sections")
def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections, each opened by the splitter and a number."""
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


@check("detectable_format:json_format")
def json_format(text: str) -> bool:
    """The whole response is JSON, perhaps in a code fence."""
    bare = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(bare)
    except (ValueError, RecursionError):
        return False
    return True


@check("detectable_format:title")
def title(text: str) -> bool:
    """A <<title>> occurs, on one line."""
    return any(line[line.find("<<") : line.rfind(">>")].strip("<> ") for line in text.split("\n") if "<<" in line)


@check("combination:two_responses")
def two_responses(text: str) -> bool:
    """Two different responses, separated by ******."""
    parts = [part.strip() for part in text.split("******")]
    present = [part for part in parts if part]
    return len(present) == 2 and all(parts[1:-1]) and present[0] != present[1]


@check("combination:repeat_prompt")
def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """The response starts with the request, word for word."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@check("startend:end_checker")
def end_checker(text: str, end_phrase: str) -> bool:
    """The response ends with a phrase."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@check("startend:quotation")
def quotation(text: str) -> bool:
    """The whole response is in double quotation marks."""
    bare = text.strip()
    return len(bare) > 1 and bare[0] == '"' and bare[-1] == '"'


@check("change_case:capital_word_frequency")
def capital_words(text: str, capital_frequency: int, capital_relation: str | None = None) -> bool:
    """So many words in capitals; `U.S.A.` and `X-RAY` are one each."""
    found = re.findall(r"[^\s,;:!?()\[\]{}\"“”]+", text)
    return compare(sum(word.isupper() for word in found), capital_relation, capital_frequency)


@check("change_case:english_capital")
def english_capital(text: str) -> bool:
    """English, in capitals only."""
    return text.isupper() and is_language(text.lower(), "en") is not False  # what is asked for is the case


@check("change_case:english_lowercase")
def english_lowercase(text: str) -> bool:
    """English, in lower case only."""
    return text.islower() and is_language(text, "en") is not False


@check("punctuation:no_comma")
def no_comma(text: str) -> bool:
    """No comma."""
    return "," not in text


class UnknownKind(ValueError):
    """A constraint of a kind that nobody knows."""


def keeps(text: str, name: str, arguments: dict[str, Any]) -> bool | None:
    """Whether a response keeps one constraint, None: it does not show. Arguments that the kind has not are ignored."""
    function = CHECKS.get(name)
    if function is None:
        raise UnknownKind(f"unknown kind '{name}'")
    known = inspect.signature(function).parameters
    given = {key: value for key, value in arguments.items() if key in known and value is not None}
    return bool(text.strip()) and function(text, **given)
