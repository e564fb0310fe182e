"""Instruction-following checks by the public IFEval names, with the public argument names.

A check takes the response and the constraint's keyword arguments and says whether it is kept, or None where that does
not show; what is one expression stands in the table itself. All are linear in the response. What IFEval leaves to a
library is done by simple rules here (sentences) or by another one (`languages`).
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from contextlib import suppress

from upshot.tasks.verifiers.ifeval.languages import is_language

Check = Callable[..., bool | None]
_RELATIONS = {
    "at least": operator.ge,
    "less than": operator.lt,
    "at most": operator.le,
    "no more than": operator.le,
    "exactly": operator.eq,
    "equal to": operator.eq,
    "more than": operator.gt,
}
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def compare(count: int, relation: str | None, limit: int) -> bool:
    """Whether a count stands in a relation to a limit; 'at least' where none is given."""
    relation = (relation or "at least").strip().lower()
    if relation not in _RELATIONS:
        raise ValueError(f"unknown relation '{relation}'")
    return bool(_RELATIONS[relation](count, limit))


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


def is_json(text: str) -> bool:
    """Whether a text is JSON and nothing else."""
    with suppress(ValueError, RecursionError):
        json.loads(text)
        return True
    return False


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str | None = None) -> bool:
    """How often a letter occurs, in either case."""
    return compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Exactly that many paragraphs, separated by `***`."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[1:-1] if len(parts) > 2 else []
    return all(inner) and len([part for part in parts if part]) == num_paragraphs


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """That many paragraphs, separated by blank lines, and the n-th starts with a word; `two's` starts with `two`."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    first_words = words(parts[nth_paragraph - 1].lower())
    return bool(first_words) and first_word.lower() in (first_words[0], re.split("['’]", first_words[0])[0])


def postscript(text: str, postscript_marker: str = "P.S.") -> bool:
    """The postscript marker occurs: its letters with their full stops, perhaps with spaces between."""
    letters = [letter for letter in re.split(r"[.\s]+", postscript_marker) if letter]
    spaced = r"\.\s?".join(map(re.escape, letters)) + (r"\." if postscript_marker.strip().endswith(".") else "")
    return re.search(rf"(?<!\w){spaced}", text, re.IGNORECASE) is not None


def highlights(text: str, num_highlights: int) -> bool:
    """At least that many *highlighted* parts."""
    double = re.findall(r"\*\*[^\n*]*\*\*", text)
    single = re.findall(r"\*[^\n*]*\*", text)
    return len([part for part in double + single if part.strip("* ")]) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """At least that many sections, each opened by the splitter and a number."""
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def title(text: str) -> bool:
    """A <<title>> occurs, on one line."""
    return any(line[line.find("<<") : line.rfind(">>")].strip("<> ") for line in text.split("\n") if "<<" in line)


def two_responses(text: str) -> bool:
    """Two different responses, separated by ******."""
    parts = [part.strip() for part in text.split("******")]
    present = [part for part in parts if part]
    return len(present) == 2 and all(parts[1:-1]) and present[0] != present[1]


def quotation(text: str) -> bool:
    """The whole response is in double quotation marks."""
    bare = text.strip()
    return len(bare) > 1 and bare[0] == '"' and bare[-1] == '"'


def capital_words(text: str, capital_frequency: int, capital_relation: str | None = None) -> bool:
    """The number of words in capitals; `U.S.A.` and `X-RAY` are one each."""
    written_words = re.findall(r"[^\s,;:!?()\[\]{}\"“”]+", text)
    return compare(sum(word.isupper() for word in written_words), capital_relation, capital_frequency)


IFEVAL: dict[str, Check] = {
    "keywords:existence": lambda text, keywords: all(occurrences(text, word) for word in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation=None: compare(
        occurrences(text, keyword), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: not any(has_word(text, word) for word in forbidden_words),
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": lambda text, language: is_language(text, language),
    "length_constraints:number_sentences": lambda text, num_sentences, relation=None: compare(
        len(sentences(text)), relation, num_sentences
    ),
    # IFEval counts `don't` as two
    "length_constraints:number_words": lambda text, num_words, relation=None: compare(
        len(re.findall(r"\w+", text)), relation, num_words
    ),
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": postscript,
    # exactly that many lines that start with - or a single *
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(re.findall(r"^[^\S\n]*(?:\*[^*\n]|-)", text, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text, options=None: any(
        option in text for option in options or _ANSWERS
    ),
    "detectable_format:number_highlighted_sections": highlights,
    "detectable_format:multiple_sections": multiple_sections,
    # perhaps in a code fence
    "detectable_format:json_format": lambda text: is_json(
        re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    ),
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_words,
    # what is asked for is the case: a text too short to tell its language may be English
    "change_case:english_capital": lambda text: text.isupper() and is_language(text.lower(), "en") is not False,
    "change_case:english_lowercase": lambda text: text.islower() and is_language(text, "en") is not False,
    "punctuation:no_comma": lambda text: "," not in text,
}
"""Checks by IFEval instruction id."""
