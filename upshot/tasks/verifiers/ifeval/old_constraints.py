"""The older OLMo rows (`{"func_name": "verify_keyword_frequency", "N": 3, …}`): their functions by name.

They read some kinds otherwise than IFEval does, as open-instruct's own functions do: "N times" is exactly N, letters
are counted in their own case, paragraphs stand between `* * *`, "around" allows a tenth (of sentences: one).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from upshot.tasks.verifiers.ifeval.checks import check

SAME: dict[str, tuple[str, dict[str, str]]] = {
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}),
    "validate_quotation": ("startend:quotation", {}),
    "validate_response_language": ("language:response_language", {}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}),
    "validate_title": ("detectable_format:title", {}),
    "validate_choice": ("detectable_format:constrained_response", {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"N": "num_highlights"}),
    "validate_no_commas": ("punctuation:no_comma", {}),
}
"""Functions that mean what an IFEval kind means → its id, and how their arguments are called there."""


def meets(count: int, quantifier: str, wanted: int, slack: int) -> bool:
    """'at least', 'at most', or 'around' within a slack; any other word is kept by nothing."""
    if quantifier == "around":
        return abs(count - wanted) <= slack
    return count >= wanted if quantifier == "at least" else quantifier == "at most" and count <= wanted


def tenth(wanted: int) -> int:
    """The slack of 'around'."""
    return max(round(wanted * 0.1), 1)


@check("verify_keyword_frequency")
def keyword_frequency(text: str, word: str, N: int) -> bool:
    """A word exactly so often."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)) == N


@check("validate_forbidden_words")
def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs, inside words neither."""
    return not any(word.lower() in text.lower() for word in forbidden_words)


@check("verify_letter_frequency")
def exact_letter_frequency(text: str, letter: str, N: int) -> bool:
    """A letter exactly so often, in this case."""
    return text.count(letter) == N


@check("verify_paragraph_count")
def paragraph_count(text: str, N: int) -> bool:
    """So many paragraphs, separated by `* * *`."""
    parts = text.split("* * *")
    return len(parts) == N and all(part.strip() for part in parts)


@check("validate_word_constraint")
def word_constraint(text: str, N: int, quantifier: str) -> bool:
    """So many words."""
    return meets(len(text.split()), quantifier, N, tenth(N))


@check("verify_sentence_constraint")
def sentence_constraint(text: str, N: int, quantifier: str) -> bool:
    """So many sentences; a full stop of `e.g.` or `Dr.` ends none."""
    text = text.strip()
    ends = [m.start() + 1 for m in re.finditer(r"[.?!]\s", text)]
    short = sum(bool(re.search(r"\w\.\w\.$|[A-Z][a-z]\.$", text[max(0, end - 4) : end])) for end in ends)
    return meets(len(ends) - short + 1, quantifier, N, 1)


@check("validate_paragraphs")
def paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    """So many paragraphs, separated by blank lines, and the i-th starts with a word."""
    parts = text.split("\n\n")
    return len(parts) == N and 0 < i <= N and parts[i - 1].strip().startswith(first_word)


@check("verify_postscript")
def postscript_follows(text: str, postscript_marker: str) -> bool:
    """The marker occurs and something follows it."""
    return bool(text.partition(postscript_marker)[2].strip())


@check("verify_bullet_points")
def bullet_points(text: str, N: int) -> bool:
    """Exactly so many lines that start with * or -."""
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N


@check("validate_sections")
def sections(text: str, N: int, section_splitter: str) -> bool:
    """Exactly so many sections between the splitters, an opening before the first one counted."""
    parts = text.split(section_splitter)
    return len(parts) - (parts[0] == "") == N


@check("validate_json_format")
def whole_json(text: str) -> bool:
    """The whole response is JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@check("validate_repeat_prompt")
def repeats_prompt(text: str, original_prompt: str) -> bool:
    """The response starts with the request, to the letter."""
    return text.startswith(original_prompt)


@check("validate_two_responses")
def two_different(text: str) -> bool:
    """Two different responses, separated by ******."""
    first, _, second = text.partition("******")
    return text.count("******") == 1 and first.strip() != second.strip()


@check("validate_uppercase")
def uppercase(text: str) -> bool:
    """No small letter, in whatever language."""
    return text == text.upper()


@check("validate_lowercase")
def lowercase(text: str) -> bool:
    """No capital letter, in whatever language."""
    return text == text.lower()


@check("validate_frequency_capital_words")
def capital_word_count(text: str, N: int, quantifier: str) -> bool:
    """So many words in capitals."""
    return meets(len(re.findall(r"\b[A-Z]+\b", text)), quantifier, N, tenth(N))


@check("validate_end")
def ends_with(text: str, end_phrase: str) -> bool:
    """The response ends with a phrase, to the letter."""
    return text.rstrip().endswith(end_phrase.rstrip())
