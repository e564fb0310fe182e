"""The 29 kinds that OLMo's multi-constraint sets (`IF_multi_constraints_upto5`) add to IFEval, by their public names.

Words are counted without punctuation, in any case; keywords are found as IFEval finds them, inside words too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from upshot.tasks.verifiers.ifeval.checks import (
    check,
    compare,
    has_word,
    letter_frequency,
    number_paragraphs,
    occurrences,
    sentences,
    words,
)

_EDGE = re.compile(r"^\W+|\W+$")
_DIVIDER = re.compile(r"\s?\* ?\* ?\*\s?")


def one(given: str | Sequence[str]) -> str:
    """An argument that some rows wrap in a list."""
    return (given if isinstance(given, str) else given[0]).strip()


def same_text(text: str, other: str) -> bool:
    """Whether two texts are the same but for case and the space around."""
    return text.strip().lower() == other.strip().lower()


def tokens(text: str) -> list[str]:
    """What stands between spaces, without the punctuation around it, in lower case."""
    return [bare for token in text.split() if (bare := _EDGE.sub("", token).lower())]


@check("copy:repeat_phrase")
def repeat_phrase(text: str, phrase: str, small_n: int) -> bool:
    """The phrase so many times, each time with one word inside it replaced."""
    wanted, said = tokens(phrase), tokens(text)
    size = len(wanted)
    spans = [said[i : i + size] for i in range(len(said) - size + 1)]
    found = [span for span in spans if span[0] == wanted[0] and span[-1] == wanted[-1]] if size > 1 else []
    changed = [sum(a != b for a, b in zip(span, wanted, strict=True)) for span in found]
    return len(changed) == small_n and all(count == 1 for count in changed)


@check("copy:copy")
@check("copy:copying_simple")
def copy(text: str, prompt_to_repeat: str) -> bool:
    """The request and nothing else."""
    return same_text(text, prompt_to_repeat)


@check("copy:copying_multiple")
def copying_multiple(text: str, prompt_to_repeat: str, N: int) -> bool:
    """The request so many times, separated by ******, and nothing else."""
    parts = text.split("******")
    return len(parts) == N and all(same_text(part, prompt_to_repeat) for part in parts)


@check("new:copy_span_idx")
def copy_span(text: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """The characters of the request from one index to another, whether the last counts or not."""
    return any(same_text(text, prompt_to_repeat[n_start:end]) for end in (n_end, n_end + 1))


@check("detectable_format:sentence_hyphens")
def sentence_hyphens(text: str) -> bool:
    """Sentences joined by hyphens without spaces."""
    parts = text.strip().split("-")
    whole = all(part == part.strip() and len(sentences(part)) == 1 for part in parts)
    return whole and all(part.endswith((".", "!", "?")) for part in parts[:-1])


@check("detectable_format:square_brackets")
def square_brackets(text: str) -> bool:
    """Every word in square brackets."""
    return all(word.startswith("[") and word.endswith("]") for word in text.split())


@check("detectable_format:bigram_wrapping")
def bigram_wrapping(text: str) -> bool:
    """Every two words in double angular brackets."""
    said = text.split()
    pairs = zip(said[::2], said[1::2], strict=False)
    return len(said) > 1 and all(first.startswith("<<") and second.endswith(">>") for first, second in pairs)


@check("keywords:no_adjacent_consecutive")
def no_adjacent_consecutive(text: str) -> bool:
    """No two words in a row start with letters that follow each other in the alphabet."""
    letters = [word[0].lower() for word in text.split()]
    return all(ord(after) - ord(before) != 1 for before, after in pairwise(letters))


@check("keywords:word_once")
def word_once(text: str, keyword: str | Sequence[str]) -> bool:
    """A keyword exactly once."""
    return occurrences(text, one(keyword)) == 1


@check("keywords:word_count_different_numbers")
def word_count(text: str, keyword: str | Sequence[str], frequency: int, relation: str | None = None) -> bool:
    """A keyword so often."""
    return compare(occurrences(text, one(keyword)), relation, frequency)


@check("keywords:exclude_word_harder")
def exclude_word(text: str, keyword: str | Sequence[str]) -> bool:
    """A word of the request does not occur."""
    return not has_word(text, one(keyword))


@check("keywords:palindrome")
def palindrome(text: str) -> bool:
    """A word of two letters or more reads the same backwards."""
    return any(len(word) > 1 and word == word[::-1] for word in tokens(text))


@check("keywords:keyword_specific_position")
def keyword_position(text: str, keyword: str | Sequence[str], n: int, m: int) -> bool:
    """A keyword is the m-th word of the n-th sentence."""
    found = sentences(text)
    said = words(found[n - 1]) if 0 < n <= len(found) else []
    return 0 < m <= len(said) and same_text(said[m - 1], one(keyword))


@check("keywords:start_end")
def start_end(text: str) -> bool:
    """The same word first and last, with nothing behind it."""
    said = tokens(text)
    return len(said) > 1 and said[0] == said[-1] and text.strip()[-1].isalnum()


@check("paragraphs:paragraphs")
def two_paragraphs(text: str) -> bool:
    """Two paragraphs, separated by ***."""
    return number_paragraphs(text, 2)


@check("paragraphs:paragraphs2")
def two_paragraphs_by_blank_lines(text: str) -> bool:
    """Two paragraphs, separated by a blank line."""
    parts = [part.strip() for part in text.strip().split("\n\n")]
    return len(parts) == 2 and all(parts)


def _every_sentence(text: str, place: int, word: str | Sequence[str]) -> bool:
    found = [tokens(sentence) for sentence in sentences(text)]
    return bool(found) and all(said and said[place] == one(word).lower() for said in found)


@check("first_word:first_word_sent")
def first_word_of_sentences(text: str, first_word: str | Sequence[str]) -> bool:
    """Every sentence starts with a word."""
    return _every_sentence(text, 0, first_word)


@check("last_word:last_word_sent")
def last_word_of_sentences(text: str, last_word: str | Sequence[str]) -> bool:
    """Every sentence ends with a word."""
    return _every_sentence(text, -1, last_word)


@check("first_word:first_word_answer")
def first_word_of_answer(text: str, first_word: str | Sequence[str]) -> bool:
    """The response starts with a word."""
    return tokens(text)[:1] == [one(first_word).lower()]


@check("last_word:last_word_answer")
def last_word_of_answer(text: str, last_word: str | Sequence[str]) -> bool:
    """The response ends with a word."""
    return tokens(text)[-1:] == [one(last_word).lower()]


def _without(mark: str) -> Callable[[str], bool]:
    return lambda text: mark not in text


check("punctuation:punctuation_dot")(_without("."))
check("punctuation:punctuation_exclamation")(_without("!"))
check("letters:letter_counting2")(letter_frequency)


@check("count:lowercase_counting")
def lowercase_counting(text: str, N: int) -> bool:
    """At most so many words in small letters."""
    return len(re.findall(r"\b[a-z]+\b", text)) <= N


@check("letters:letter_counting")
def letter_counting(text: str, N: int, relation: str | None = None) -> bool:
    """So many letters."""
    return compare(len(re.findall("[a-zA-Z]", text)), relation, N)


@check("count:counting_composition")
def counting_composition(text: str, n_sent: int, n_words: int) -> bool:
    """Three paragraphs (by * * *) of so many sentences of so many words each."""
    parts = [part for part in _DIVIDER.split(text) if part.strip()]
    said = [sentences(part) for part in parts]
    return len(parts) == 3 and all(
        len(part) == n_sent and all(len(words(sentence)) == n_words for sentence in part) for part in said
    )


@check("count:count_unique")
def count_unique(text: str) -> bool:
    """No word twice."""
    said = [word.lower() for word in words(text)]
    return len(said) == len(set(said))


@check("count:count_increment_word")
def count_increment(text: str, keyword1: str | Sequence[str], keyword2: str | Sequence[str]) -> bool:
    """One keyword once, the other twice."""
    return occurrences(text, one(keyword1)) == 1 and occurrences(text, one(keyword2)) == 2
