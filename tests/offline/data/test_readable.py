"""TRL and verl read the parquet without changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from upshot.offline.data.prepare import PrepareSettings, prepare

datasets = pytest.importorskip("datasets")
MULTITURN = str(Path(__file__).parent / "samples" / "multiturn-math-hard.jsonl")


def load(tmp_path: Path, purpose: str) -> datasets.DatasetDict:
    prepare(MULTITURN, tmp_path, PrepareSettings(purpose, min_gap=0.0, default_system="Be kind."))
    files = {split: str(tmp_path / f"{purpose}_{split}.parquet") for split in ("train", "validation")}
    return datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize(("purpose", "columns"), [("sft", {"messages"}), ("dpo", {"prompt", "chosen", "rejected"})])
def test_trl_takes_the_rows_as_conversations(tmp_path: Path, purpose: str, columns: set[str]) -> None:
    from trl import is_conversational

    loaded = load(tmp_path, purpose)
    row = loaded["train"][0]
    assert columns <= set(row) and is_conversational(row)
    assert loaded["train"].features == loaded["validation"].features


def test_trl_renders_chosen_and_rejected_behind_the_same_prompt(tmp_path: Path) -> None:
    from trl import apply_chat_template

    class Tokenizer:
        """A minimal tokenizer: a ChatML template."""

        def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=False, **_):  # type: ignore[no-untyped-def]
            text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
            return text + ("<assistant>" if add_generation_prompt else "")

    row = load(tmp_path, "dpo")["train"][0]
    shown = apply_chat_template(row, Tokenizer())
    assert shown["prompt"].startswith("<system>Be kind.<user>") and shown["prompt"].endswith("<assistant>")
    assert shown["chosen"] == row["chosen"][0]["content"] and shown["rejected"] == row["rejected"][0]["content"]


def test_verl_finds_its_columns(tmp_path: Path) -> None:
    """What verl's RLHFDataset reads of a row: prompt as messages, extra_info with index and interaction_kwargs."""
    for split in load(tmp_path, "rl").values():
        for row in split:
            assert isinstance(row["prompt"], list) and set(row["prompt"][0]) == {"role", "content"}
            assert isinstance(row["extra_info"]["index"], int)
            assert row["extra_info"]["interaction_kwargs"]["name"] == "collabllm"
            assert row["data_source"] and row["agent_name"] and row["reward_model"]["ground_truth"]
