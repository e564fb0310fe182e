"""Search over a local corpus: BM25 by SQLite's full-text index, in memory; no service, no index on disk."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from upshot.core.errors import UserError
from upshot.core.files import iter_jsonl, read_text

_STOP = re.compile("a|an|and|are|as|at|be|by|for|from|in|is|it|of|on|or|that|the|to|was|were|which|who|what")


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text that can be found."""

    title: str
    text: str


class Corpus:
    """Passages with a full-text index in memory."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        self.passages = list(passages)
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text)")
        rows = ((number, _utf8(passage.title), _utf8(passage.text)) for number, passage in enumerate(self.passages))
        self._index.executemany("INSERT INTO passages(rowid, title, text) VALUES (?, ?, ?)", rows)

    def search(self, query: str, count: int = 3) -> list[Passage]:
        """The passages that fit a query best; ties go to the earlier passage."""
        words = dict.fromkeys(re.findall(r"\w+", _utf8(query[:1000]).lower()))
        # Quoted, a word is never an operator of SQLite's query language.
        query_text = " OR ".join(f'"{word}"' for word in words if not _STOP.fullmatch(word))
        ranked = "SELECT rowid FROM passages WHERE passages MATCH ? ORDER BY rank, rowid LIMIT ?"
        rows = self._index.execute(ranked, (query_text, count)) if query_text else ()
        return [self.passages[number] for (number,) in rows]


def _utf8(text: str) -> str:
    """The text without lone surrogates, which SQLite cannot store."""
    return text.encode("utf-8", "replace").decode()


def load_corpus(path: str) -> Corpus:
    """A corpus from JSONL rows {title?, text} (also `contents`), or from a text file whose paragraphs are passages."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"there is no corpus file '{path}' (JSONL with 'text', or a text file of paragraphs)")
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
