"""Lines of JSON: one rule for reading and writing."""

from __future__ import annotations

import io
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import humaneval
from upshot.core.errors import UserError
from upshot.core.files import (
    append_jsonl,
    dump_json_line,
    expand_home,
    filter_jsonl,
    read_jsonl,
    read_user_jsonl,
    write_folder,
    write_jsonl,
)
from upshot.core.score import Score
from upshot.offline.job import Journal
from upshot.run.report.lines import LogTail
from upshot.tasks.datasets.files import read_table
from upshot.tasks.participants.search import load_corpus

MARKS = "one\u2028two\u2029three\u0085four\x0bfive\x0csix\x1cseven\x1deight\r\nnine \ud83d"
"""What `splitlines` treats as line ends, and half of an emoji."""


def test_every_reader_ends_lines_only_at_a_line_feed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_jsonl(path, [{"text": MARKS}, {"text": "plain"}])
    texts = [MARKS, "plain"]
    assert [row["text"] for row in read_jsonl(path)] == texts
    assert [row["text"] for row in read_table(path)] == texts
    assert [row["text"] for _, _, row in LogTail(path).read()] == texts
    assert [passage.text for passage in load_corpus(str(path)).passages] == texts
    with Journal(path, None) as journal:
        assert [row["text"] for row in journal.lines] == texts
    problem = dict.fromkeys(humaneval.FIELDS, MARKS) | {"test": "def check(f):\n    assert f(1) == 1\n"}
    write_jsonl(path, [problem])
    assert humaneval.load(path)[0].prompt == MARKS


objects = st.dictionaries(
    st.text(), st.integers() | st.text(st.characters()) | st.floats(allow_nan=False, allow_infinity=False)
)


@given(st.lists(objects, max_size=4), objects, st.integers(0, 60))
def test_lines_before_a_crash_and_lines_appended_after_it_are_whole(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], more: dict[str, Any], cut: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "x.jsonl"
    write_jsonl(path, rows)
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    before = read_jsonl(path)
    assert before == rows[: len(before)] and len(before) >= path.read_bytes().count(b"\n")
    append_jsonl(path, [more])
    assert read_jsonl(path) == [*before, more]


def test_a_whole_last_line_without_its_line_feed_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}')
    assert [row["n"] for row in read_jsonl(path)] == [row["n"] for row in read_table(path)] == [1, 2]
    with Journal(path, None) as journal:
        journal.append({"n": 3})
    assert [row["n"] for row in read_jsonl(path)] == [1, 2, 3]


def test_a_damaged_line_is_skipped_with_a_note_in_our_files_and_refused_in_users_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": \n{"n": 3}\n{"n"')
    with caplog.at_level(logging.WARNING):
        assert [row["n"] for row in read_jsonl(path)] == [1, 3]
    assert "line 2 is damaged" in caplog.text and "line 4" not in caplog.text
    for content in (path.read_bytes(), b"[1]\n", b'{"n": 1}\n{"n"'):
        with pytest.raises(UserError, match=r"f.jsonl, line \d is not JSON, or not an object"):
            list(read_user_jsonl(io.BytesIO(content), "f.jsonl"))
    with pytest.raises(UserError, match=r"f.jsonl, line 1 is not UTF-8; save the file as UTF-8"):
        list(read_user_jsonl(io.BytesIO(b'{"n": "\xff"}\n'), "f.jsonl"))


def test_removing_lines_leaves_the_others_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes('{"n":1,  "t": "a\u2028b"}\n{"n": 2}\n{"n": 3}\n{"n": 4, "t'.encode())
    filter_jsonl(path, lambda row: row["n"] != 2)
    assert path.read_bytes() == '{"n":1,  "t": "a\u2028b"}\n{"n": 3}\n'.encode()


class Odd:
    """An object that JSON does not know and whose `repr` fails."""

    def __str__(self) -> str:
        raise RuntimeError


def test_every_written_value_is_a_readable_line() -> None:
    itself: list[Any] = []
    itself += [itself, itself]
    row = {
        "numbers": [np.float32(0.5), np.int64(3), np.bool_(True), np.arange(2), float("nan"), np.float64("inf")],
        "score": Score.missing("timeout").to_dict(),
        "strange": [Odd(), {1}, (1, 2), Path("x"), 1j, 10**5000],
        "itself": itself,
        "half": "\\\ud83d",
        ("a", 1): {None: 1},
    }
    data = dump_json_line(row)
    read = json.loads(data)
    assert data.count(b"\n") == 1 and data.endswith(b"\n")
    assert read["numbers"] == [0.5, 3, True, [0, 1], None, None]
    assert read["score"] == {"missing": "timeout"}
    assert read["strange"][:5] == ["<Odd>", [1], [1, 2], "x", "1j"]
    assert read["half"] == "\\\ud83d" and read["('a', 1)"] == {"None": 1}


def test_an_unexpanded_tilde_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for text in ("~/x", "$HOME/x", "${HOME}/x"):
        assert expand_home(text) == "/home/me/x"
        assert expand_home(f"run_dir={text}") == "run_dir=/home/me/x"
        assert expand_home(f"--out={text}") == "--out=/home/me/x"
    for text in ("a~/x", "$HOMER/x", "~you/x", "x $HOME/y", "see: ~/x"):
        assert expand_home(text) == text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(28, "No space left on device"),
            "cannot write adapter '.*whole': No space left on device; delete",
        ),
        (
            RuntimeError("PytorchStreamWriter failed writing file data/0"),
            "cannot write adapter .*No space left on device",
        ),
        (Exception("File too large (os error 27)"), "cannot write adapter .*File too large; delete"),
        (Exception("No space left on device (os error 28)"), "cannot write adapter .*No space left on device; delete"),
        (UserError("no such model 'm' (os error 28)"), "^no such model 'm'"),
    ],
)
def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path, error: Exception, message: str) -> None:
    def write(to: Path) -> None:
        raise error

    with pytest.raises(UserError, match=message):
        write_folder(tmp_path / "whole", write, "adapter ", "delete some")
    assert not list(tmp_path.iterdir())


def test_an_error_while_reading_is_not_reported_as_a_full_disk(tmp_path: Path) -> None:
    def write(to: Path) -> None:
        raise ValueError("Error while deserializing header: InvalidHeader (os error 2)")

    with pytest.raises(ValueError, match="deserializing"):
        write_folder(tmp_path / "whole", write)


def test_weights_that_a_library_wrote_as_private_follow_the_umask(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"")
        (folder / "model.safetensors").chmod(0o600)

    before = os.umask(0o027)
    try:
        write_folder(tmp_path / "whole", write)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "whole").iterdir()} == {0o640}
