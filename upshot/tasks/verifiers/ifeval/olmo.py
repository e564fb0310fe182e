"""The 29 kinds that OLMo's multi-constraint sets (`IF_multi_constraints_upto5`) add to IFEval, by their public names.

Words are counted without punctuation, in any case; keywords are found as IFEval finds them, inside words too.

And the functions that OLMo's older rows name (`{"func_name": "verify_keyword_frequency", "N": 3, …}`). They read some
kinds differently from IFEval, as open-instruct's own functions do: "N times" is exactly N, letters are counted in
their own case, paragraphs stand between `* * *`, "around" allows a tenth (of sentences: one).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import yaml

from upshot.tasks.verifiers.ifeval.checks import (
    Check,
    compare,
    has_word,
    is_json,
    letter_frequency,
    number_paragraphs,
    occurrences,
    sentences,
    words,
)

_EDGE = re.compile(r"^\W+|\W+$")
_DIVIDER = re.compile(r"\s?\* ?\* ?\*\s?")


def one(text: str | Sequence[str]) -> str:
    """An argument that some rows wrap in a list."""
    return (text if isinstance(text, str) else text[0]).strip()


def same_text(text: str, other: str) -> bool:
    """Whether two texts are the same but for case and the space around."""
    return text.strip().lower() == other.strip().lower()


def tokens(text: str) -> list[str]:
    """What stands between spaces, without the punctuation around it, in lower case."""
    return [bare for token in text.split() if (bare := _EDGE.sub("", token).lower())]


def repeat_phrase(text: str, phrase: str, small_n: int) -> bool:
    """The phrase a given number of times, each time with one word inside it replaced."""
    wanted, replied = tokens(phrase), tokens(text)
    size = len(wanted)
    spans = [replied[i : i + size] for i in range(len(replied) - size + 1)]
    candidates = [span for span in spans if span[0] == wanted[0] and span[-1] == wanted[-1]] if size > 1 else []
    changed = [sum(a != b for a, b in zip(span, wanted, strict=True)) for span in candidates]
    return len(changed) == small_n and all(count == 1 for count in changed)


def copy(text: str, prompt_to_repeat: str) -> bool:
    """The request and nothing else."""
    return same_text(text, prompt_to_repeat)


def copying_multiple(text: str, prompt_to_repeat: str, N: int) -> bool:
    """The request a given number of times, separated by ******, and nothing else."""
    parts = text.split("******")
    return len(parts) == N and all(same_text(part, prompt_to_repeat) for part in parts)


def sentence_hyphens(text: str) -> bool:
    """Sentences joined by hyphens without spaces."""
    parts = text.strip().split("-")
    whole = all(part == part.strip() and len(sentences(part)) == 1 for part in parts)
    return whole and all(part.endswith((".", "!", "?")) for part in parts[:-1])


def bigram_wrapping(text: str) -> bool:
    """Every two words in double angular brackets."""
    written = text.split()
    pairs = zip(written[::2], written[1::2], strict=False)
    return len(written) > 1 and all(first.startswith("<<") and second.endswith(">>") for first, second in pairs)


def no_adjacent_consecutive(text: str) -> bool:
    """No two words in a row start with letters that follow each other in the alphabet."""
    letters = [word[0].lower() for word in text.split()]
    return all(ord(after) - ord(before) != 1 for before, after in pairwise(letters))


def keyword_position(text: str, keyword: str | Sequence[str], n: int, m: int) -> bool:
    """A keyword is the m-th word of the n-th sentence."""
    every = sentences(text)
    chosen = words(every[n - 1]) if 0 < n <= len(every) else []
    return 0 < m <= len(chosen) and same_text(chosen[m - 1], one(keyword))


def start_end(text: str) -> bool:
    """The same word first and last, with nothing behind it."""
    written = tokens(text)
    return len(written) > 1 and written[0] == written[-1] and text.strip()[-1].isalnum()


def every_sentence(text: str, place: int, word: str | Sequence[str]) -> bool:
    """Whether every sentence has a word at a place."""
    tokens_of_sentences = [tokens(sentence) for sentence in sentences(text)]
    return bool(tokens_of_sentences) and all(
        written and written[place] == one(word).lower() for written in tokens_of_sentences
    )


def counting_composition(text: str, n_sent: int, n_words: int) -> bool:
    """Three paragraphs (by * * *) with a given number of sentences of a given number of words."""
    parts = [part for part in _DIVIDER.split(text) if part.strip()]
    sentences_of_parts = [sentences(part) for part in parts]
    return len(parts) == 3 and all(
        len(part) == n_sent and all(len(words(sentence)) == n_words for sentence in part) for part in sentences_of_parts
    )


def count_unique(text: str) -> bool:
    """No word twice."""
    written = [word.lower() for word in words(text)]
    return len(written) == len(set(written))


OLMO: dict[str, Check] = {
    "copy:repeat_phrase": repeat_phrase,
    "copy:copy": copy,
    "copy:copying_simple": copy,
    "copy:copying_multiple": copying_multiple,
    # whether the character at the last index counts or not
    "new:copy_span_idx": lambda text, prompt_to_repeat, n_start, n_end: any(
        same_text(text, prompt_to_repeat[n_start:end]) for end in (n_end, n_end + 1)
    ),
    "detectable_format:sentence_hyphens": sentence_hyphens,
    "detectable_format:square_brackets": lambda text: all(
        word.startswith("[") and word.endswith("]") for word in text.split()
    ),
    "detectable_format:bigram_wrapping": bigram_wrapping,
    "keywords:no_adjacent_consecutive": no_adjacent_consecutive,
    "keywords:word_once": lambda text, keyword: occurrences(text, one(keyword)) == 1,
    "keywords:word_count_different_numbers": lambda text, keyword, frequency, relation=None: compare(
        occurrences(text, one(keyword)), relation, frequency
    ),
    "keywords:exclude_word_harder": lambda text, keyword: not has_word(text, one(keyword)),
    "keywords:palindrome": lambda text: any(len(word) > 1 and word == word[::-1] for word in tokens(text)),
    "keywords:keyword_specific_position": keyword_position,
    "keywords:start_end": start_end,
    "paragraphs:paragraphs": lambda text: number_paragraphs(text, 2),
    # separated by a blank line
    "paragraphs:paragraphs2": lambda text: len(parts := text.strip().split("\n\n")) == 2 and all(map(str.strip, parts)),
    "first_word:first_word_sent": lambda text, first_word: every_sentence(text, 0, first_word),
    "last_word:last_word_sent": lambda text, last_word: every_sentence(text, -1, last_word),
    "first_word:first_word_answer": lambda text, first_word: tokens(text)[:1] == [one(first_word).lower()],
    "last_word:last_word_answer": lambda text, last_word: tokens(text)[-1:] == [one(last_word).lower()],
    "punctuation:punctuation_dot": lambda text: "." not in text,
    "punctuation:punctuation_exclamation": lambda text: "!" not in text,
    "letters:letter_counting": lambda text, N, relation=None: compare(len(re.findall("[a-zA-Z]", text)), relation, N),
    "letters:letter_counting2": letter_frequency,
    "count:lowercase_counting": lambda text, N: len(re.findall(r"\b[a-z]+\b", text)) <= N,
    "count:counting_composition": counting_composition,
    "count:count_unique": count_unique,
    "count:count_increment_word": lambda text, keyword1, keyword2: (
        occurrences(text, one(keyword1)) == 1 and occurrences(text, one(keyword2)) == 2
    ),
}
"""Checks by instruction id."""


def meets(count: int, quantifier: str, wanted: int, slack: int) -> bool:
    """'at least', 'at most', or 'around' within a slack; any other word is kept by nothing."""
    if quantifier == "around":
        return abs(count - wanted) <= slack
    return count >= wanted if quantifier == "at least" else quantifier == "at most" and count <= wanted


def tenth(wanted: int) -> int:
    """The slack of 'around'."""
    return max(round(wanted * 0.1), 1)


def sentence_constraint(text: str, N: int, quantifier: str) -> bool:
    """The number of sentences; a full stop of `e.g.` or `Dr.` ends none."""
    text = text.strip()
    ends = [m.start() + 1 for m in re.finditer(r"[.?!]\s", text)]
    short = sum(bool(re.search(r"\w\.\w\.$|[A-Z][a-z]\.$", text[max(0, end - 4) : end])) for end in ends)
    return meets(len(ends) - short + 1, quantifier, N, 1)


def paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    """Exactly N paragraphs, separated by blank lines, and the i-th starts with a word."""
    parts = text.split("\n\n")
    return len(parts) == N and 0 < i <= N and parts[i - 1].strip().startswith(first_word)


def sections(text: str, N: int, section_splitter: str) -> bool:
    """Exactly that many sections between the splitters, an opening before the first one counted."""
    parts = text.split(section_splitter)
    return len(parts) - (parts[0] == "") == N


OLD: dict[str, Check] = {
    "verify_keyword_frequency": lambda text, word, N: (
        len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)) == N
    ),
    # inside words neither
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(word.lower() in text.lower() for word in forbidden_words)
    ),
    "verify_letter_frequency": lambda text, letter, N: text.count(letter) == N,
    # separated by `* * *`
    "verify_paragraph_count": lambda text, N: len(parts := text.split("* * *")) == N and all(map(str.strip, parts)),
    "validate_word_constraint": lambda text, N, quantifier: meets(len(text.split()), quantifier, N, tenth(N)),
    "verify_sentence_constraint": sentence_constraint,
    "validate_paragraphs": paragraphs,
    # something follows the marker
    "verify_postscript": lambda text, postscript_marker: bool(text.partition(postscript_marker)[2].strip()),
    "verify_bullet_points": lambda text, N: sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N,
    "validate_sections": sections,
    "validate_json_format": is_json,
    "validate_repeat_prompt": lambda text, original_prompt: text.startswith(original_prompt),
    "validate_two_responses": lambda text: (
        len({*map(str.strip, text.split("******"))}) == text.count("******") + 1 == 2
    ),
    # in whatever language
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": lambda text, N, quantifier: meets(
        len(re.findall(r"\b[A-Z]+\b", text)), quantifier, N, tenth(N)
    ),
    "validate_end": lambda text, end_phrase: text.rstrip().endswith(end_phrase.rstrip()),
}
"""Checks by the names of the older functions."""
SAME: dict[str, tuple[str, dict[str, str]]] = yaml.safe_load(Path(__file__).with_name("same.yaml").read_text("utf-8"))
"""Functions that mean what an IFEval kind means → its id, and how their arguments are called there."""
