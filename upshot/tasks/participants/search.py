"""Search over a local corpus: BM25 over passages, no service, no index on disk."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from upshot.core.errors import UserError
from upshot.core.files import iter_jsonl, read_text

_K1, _B = 1.2, 0.75
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text that can be found."""

    title: str
    text: str


class Corpus:
    """Passages with an inverted index in memory."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        self.passages = list(passages)
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._lengths: list[int] = []
        for number, passage in enumerate(self.passages):
            counts = Counter(_tokens(f"{passage.title} {passage.text}"))
            self._lengths.append(counts.total())
            for word, count in counts.items():
                self._postings[word].append((number, count))
        self._mean = sum(self._lengths) / len(self._lengths) if self._lengths else 1.0

    def search(self, query: str, count: int = 3) -> list[Passage]:
        """The passages that fit a query best; ties go to the earlier passage."""
        scores: dict[int, float] = defaultdict(float)
        for word in dict.fromkeys(_tokens(query[:1000])):
            postings = self._postings.get(word, [])
            weight = math.log(1 + (len(self.passages) - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, found in postings:
                length = 1 - _B + _B * self._lengths[number] / self._mean
                scores[number] += weight * found * (_K1 + 1) / (found + _K1 * length)
        best = sorted(scores, key=lambda number: (-scores[number], number))[:count]
        return [self.passages[number] for number in best]


def load_corpus(path: str) -> Corpus:
    """A corpus from JSONL rows {title?, text} (also `contents`), or from a text file whose paragraphs are passages."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"no corpus file '{path}' (JSONL with 'text', or a text file of paragraphs)")
    if file.suffix != ".jsonl":
        parts = [part.strip() for part in re.split(r"\n\s*\n", read_text(file, "corpus")) if part.strip()]
        return Corpus(Passage("", part) for part in parts)
    passages = []
    with file.open("rb") as opened:
        for line in iter_jsonl(opened):
            text = line.row.get("text") or line.row.get("contents") if line.row is not None else None
            if line.row is None or text is None:
                raise UserError(f"{path}, line {line.number}: every line must be an object with 'text'")
            passages.append(Passage(str(line.row.get("title", "")), str(text)))
    return Corpus(passages)


def _tokens(text: str) -> list[str]:
    return [word for word in _WORD.findall(text.lower()) if word not in _STOP]


_STOP = frozenset(
    ["a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "in", "is", "it", "of", "on", "or"]
) | {
    *("that", "the", "to", "was", "were", "which", "who", "what"),
}
