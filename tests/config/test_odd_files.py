"""Files that are empty, missing, read-only, not UTF-8 or otherwise odd: one line with the way out, before any work."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import yaml

from upshot.cli import main
from upshot.config.load import find_recipe, list_recipes, load_recipe
from upshot.core.errors import UserError
from upshot.core.files import check_writable
from upshot.models.local import load_tokenizer
from upshot.tasks.base import tasks
from upshot.tasks.datasets.files import read_table
from upshot.tasks.datasets.records import read_dialogues

LATIN = "{'question': 'Größe', 'answer': '4'}".replace("'", '"').encode("latin-1")


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv"])
def test_a_table_that_is_not_utf8_says_so(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows{ending}"
    file.write_bytes(LATIN)
    with pytest.raises(UserError, match=r"is not UTF-8.*save .* as UTF-8") as said:
        read_table(file)
    assert said.value.__cause__ is None


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
def test_an_empty_table_says_so(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows{ending}"
    file.touch()
    with pytest.raises(UserError, match="is empty: it has no rows"):
        read_table(file)


def test_a_byte_order_mark_is_not_part_of_the_first_column(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(b"\xef\xbb\xbfquestion,answer\n2 + 2,4\n")
    assert read_table(file) == [{"question": "2 + 2", "answer": "4"}]


def test_other_text_files_of_the_user_are_read_as_utf8_too(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("Sei höflich.".encode("latin-1"))
    goals = tmp_path / "goals.jsonl"
    goals.write_text('{"goal": "a", "reference": "b"}\n')
    with pytest.raises(UserError, match=r"system prompt '.*prompt.txt' is not UTF-8"):
        tasks.create("collabllm", {"file": str(goals), "system": str(file)})


def test_nothing_to_learn_from_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "sft.jsonl"
    file.write_text("\n\n")
    with pytest.raises(UserError, match=r"train.data '.*sft.jsonl' has no rows"):
        read_dialogues(str(file))


def test_score_refuses_a_file_without_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text("\n")
    assert main(["score", str(file), "--metric", "token_amount"]) == 2
    assert "has no rows" in capsys.readouterr().err


PREPARED = [
    (name, file)
    for name in list_recipes()
    for recipe in [load_recipe(name).recipe]
    for file in [recipe.train.data, recipe.task.options.get("train_file")]
    # These take the user's own file, or one that `upshot logs prepare` makes.
    if file and not name.startswith(("sft", "dpo", "kto", "logs"))
]


@pytest.mark.parametrize(("name", "file"), PREPARED)
def test_a_recipe_whose_file_does_not_exist_yet_says_how_to_make_it(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(name).recipe
    purpose = Path(file).name.partition("_")[0]
    way_out = f"make it with `upshot data prepare --dataset SOURCE --for {purpose} --out {Path(file).parent}`"
    with pytest.raises(UserError, match=way_out.replace(".", r"\.")):
        if file == recipe.train.data:
            read_dialogues(file)
        tasks.create(recipe.task.name, recipe.task.options).rows("train")


def with_parents(path: Path) -> str:
    """The text of a recipe and of all that it extends."""
    text = path.read_text()
    parents = yaml.safe_load(text).get("extends", [])
    found = [path.parent / name for name in ([parents] if isinstance(parents, str) else parents)]
    return text + "".join(with_parents(p if p.is_file() else find_recipe(p.name)) for p in found)


def test_every_recipe_with_a_prepared_file_or_its_parent_names_the_source() -> None:
    assert [name for name, _ in PREPARED if "upshot data prepare" not in with_parents(find_recipe(name))] == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that refuses to be written")
@pytest.mark.parametrize(
    "words",
    [
        ("verify", "{rows}", "--task", "gsm8k", "--out", "/proc/x/scored.jsonl"),
        ("score", "{rows}", "--metric", "token_amount", "--tokenizer", "x", "--out", "/proc/x/scores.jsonl"),
        ("data", "prepare", "--dataset", "{rows}", "--for", "rl", "--task", "gsm8k", "--out", "/proc/x"),
        ("eval", "judge", "{rows}", "--metric", "accuracy", "--judge", "scripted:echo", "--out", "/proc/x/v.jsonl"),
        ("train", "quickstart", "run_dir=/proc/x"),
    ],
)
def test_an_unwritable_output_is_refused_before_any_work(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"response": "#### 4", "ground_truth": "4", "prompt": "?", "completion": "4"}) + "\n")
    assert main([word.format(rows=rows) for word in words]) == 2
    said = capsys.readouterr()
    assert "/proc/x" in said.err
    assert "accuracy" not in said.out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match=r"cannot write .*permission denied; choose another --out"):
        check_writable(tmp_path / "out.jsonl")


def test_a_folder_at_the_outputs_path_is_refused_and_no_probe_file_is_left(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="is a directory; choose another --out"):
        check_writable(tmp_path / "out")
    check_writable(tmp_path / "fine.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_verify_ends_with_1_when_no_row_got_a_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"response": "#### 4", "ground_truth": null}\n{"response": "#### 5", "ground_truth": NaN}\n')
    assert main(["verify", str(rows), "--task", "gsm8k"]) == 1
    assert "no scores over 0 of 2 rows" in capsys.readouterr().out


def test_identical_rows_and_nan_answers_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": "2 + 2", "answer": "4"}, {"question": "2 + 2", "answer": "4"}]
    rows += [{"question": f"{n} + 1", "answer": float("nan") if n == 7 else str(n + 1)} for n in range(5, 9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level(logging.WARNING):
        found = tasks.create("exact-match", {"file": str(tmp_path / "train.jsonl"), "held_out": 0}).rows("train")
    assert "1 of 6 rows repeat another one; they are kept" in caplog.text
    assert "1 of 6 rows have no answer; their scores are missing" in caplog.text
    assert [row.reference for row in found].count(None) == 1


def test_a_model_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no tokenizer \(tokenizer.json, …\); copy those files"):
        load_tokenizer(str(tmp_path))
