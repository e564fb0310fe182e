"""Files of the original CollabLLM and of its verl recipe are read unchanged, and ours contain what theirs do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.offline.data.test_build import actors, build, command, rows_of
from upshot.offline.data.prepare import PrepareSettings, prepare
from upshot.tasks.collabllm import MathHard
from upshot.tasks.datasets.files import read_tables, unnest
from upshot.tasks.datasets.records import read_dialogues

__all__ = ["actors"]
MULTITURN = Path(__file__).parent / "samples" / "multiturn-math-hard.jsonl"


def flat() -> list[dict[str, Any]]:
    return [json.loads(line) for line in MULTITURN.read_text().splitlines()]


def nested() -> list[dict[str, Any]]:
    """The sample as the original's `build_dataset` writes it: conversations of turns of responses."""
    conversations: dict[int, dict[str, Any]] = {}
    for row in flat():
        shared = {key: row[key] for key in row if key.startswith("single_turn_")}
        turns = conversations.setdefault(row["conv_id"], {**shared, "turns": []})["turns"]
        turn = next((turn for turn in turns if turn["prompt"] == row["prompt"]), None)
        if turn is None:
            turns.append(turn := {"prompt": row["prompt"], "responses": []})
        turn["responses"].append({key: row[key] for key in ("completion", "score", "sessions", "rewards")})
    return list(conversations.values())


@pytest.mark.parametrize("purpose", ["sft", "rl", "dpo"])
def test_the_nested_file_of_the_original_is_read(tmp_path: Path, purpose: str) -> None:
    file = tmp_path / "math-hard_multiturn.json"
    file.write_text(json.dumps(nested()))
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for source, out in ((file, theirs), (MULTITURN, ours)):
        prepare(str(source), out, PrepareSettings(purpose, validation=0, min_gap=0.0))
    tables = [pyarrow.parquet.read_table(out / f"{purpose}_train.parquet") for out in (theirs, ours)]
    assert tables[0].num_rows == tables[1].num_rows > 0 and tables[0].schema == tables[1].schema
    assert {len(MathHard(file=str(source)).rows("train")) for source in (file, MULTITURN)} == {4}


def test_other_records_with_turns_are_not_changed() -> None:
    records = [{"turns": [{"question": "a"}]}, {"turns": 3}, {"goal": "x"}]
    assert unnest(records) == records


@pytest.mark.parametrize("splits", [False, True])
def test_folders_of_save_to_disk_are_read(tmp_path: Path, splits: bool) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{key: value for key, value in row.items() if key != "rewards"} for row in flat()]
    made = datasets.Dataset.from_list(rows)
    if splits:
        made = datasets.DatasetDict({"train": made.select(range(18)), "eval": made.select(range(18, 24))})
    made.save_to_disk(str(tmp_path / "saved"))
    tables = read_tables(str(tmp_path / "saved"))
    assert {split: len(table) for split, table in tables.items()} == (
        {"train": 18, "validation": 6} if splits else {"train": 24}
    )
    assert tables["train"][0] == rows[0]


def test_the_sft_file_of_the_verl_recipe_is_read(tmp_path: Path) -> None:
    whole = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    whole.append({"role": "assistant", "content": "Hello!"})
    file = tmp_path / "sft_train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": whole}]), file)
    (dialogue,) = read_dialogues(str(file))
    assert [message.content for message in dialogue] == ["Be kind.", "hi", "Hello!"]
    task = MathHard(train_file=str(file))
    assert task.dialogues("train") == [dialogue] and not task.all_rows()
    prepare(str(file), tmp_path / "out", PrepareSettings("sft", validation=0))


def test_candidates_have_the_columns_of_the_published_sets(tmp_path: Path, actors: Any) -> None:
    build(command(tmp_path, actors.goals(tmp_path, 4)))
    rows = rows_of(tmp_path)
    assert len({row["conv_id"] for row in rows}) == 4 and all(isinstance(row["conv_id"], int) for row in rows)
    assert any("[[TERMINATE CHAT]]" in session[-1]["content"] for row in rows for session in row["sessions"])
    weights = {"accuracy": 1.0, "interactivity": 1.0, "token_amount": -5e-4}
    for row in rows:
        assert isinstance(row["single_turn_metadata"], dict)
        for number, session in enumerate(row["sessions"]):
            assert session[: row["turn_id"]] == row["prompt"]
            assert session[row["turn_id"]] == {"role": "assistant", "content": row["completion"]}
            total = sum(weight * row["rewards"][name][number] for name, weight in weights.items())
            assert row["rewards"]["MR"][number] == pytest.approx(total)


def test_metadata_of_different_types_still_makes_one_column(tmp_path: Path) -> None:
    from upshot.offline.data.published import metadata_column

    facts = metadata_column([{"a": 1, "b": [1, 2]}, {"a": "x"}, {"b": [3], "c": {}}])
    assert facts[0] == {"a": "1", "b": [1, 2], "c": None} and facts[1]["a"] == '"x"' and facts[2]["c"] == "{}"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"m": one} for one in facts]), tmp_path / "m.parquet")


@pytest.mark.parametrize("purpose", ["rl", "sft"])
def test_the_rl_parquet_of_the_verl_recipe_is_prepared_like_its_source(tmp_path: Path, purpose: str) -> None:
    rows = []
    for number, row in enumerate(flat()):  # as its process_dataset.py packs them
        extra = {key: row[key] for key in row if key not in ("prompt", "single_turn_prompt", "rewards", "sessions")}
        told = {"name": "collabllm", "single_turn_prompt": row["single_turn_prompt"], "task_desc": "solving problems"}
        prompt = [{"role": "system", "content": "The assistant is helpful."}, *row["prompt"]]
        truth = row["single_turn_completion"]
        rows.append({"prompt": prompt, "raw_prompt": prompt, "ground_truth": truth, "index": str(number)})
        rows[-1] |= {"data_source": "collabllm", "agent_name": "collabllm_agent"}
        rows[-1] |= {"reward_model": {"style": "rule", "ground_truth": truth}}
        rows[-1] |= {"extra_info": {**extra, "prompt": prompt, "interaction_kwargs": told}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rl_train.parquet")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for source, out in ((tmp_path / "rl_train.parquet", theirs), (MULTITURN, ours)):
        prepare(str(source), out, PrepareSettings(purpose, validation=0))
    made, wanted = (pyarrow.parquet.read_table(out / f"{purpose}_train.parquet").to_pylist() for out in (theirs, ours))
    assert len(made) == len(wanted) > 0
    key = "prompt" if purpose == "rl" else "messages"
    said = [[m for m in row[key] if m["role"] != "system"] for row in made]  # the row's own system prompt
    assert said == [row[key] for row in wanted]
    if purpose == "rl":
        assert [row["extra_info"]["interaction_kwargs"]["single_turn_prompt"] for row in made] == [
            row["extra_info"]["interaction_kwargs"]["single_turn_prompt"] for row in wanted
        ]
