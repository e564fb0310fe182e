"""TRL's own trainers read the prepared files without changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from upshot.offline.data.prepare import PrepareSettings, prepare

MULTITURN = str(Path(__file__).parent / "samples" / "multiturn-math-hard.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("purpose", ["sft", "dpo"])
def test_a_trainer_of_trl_takes_one_step_on_the_files(tmp_path: Path, purpose: str) -> None:
    trl = pytest.importorskip("trl")
    from datasets import load_dataset

    from upshot.config.recipe import TinyConfig
    from upshot.models.tiny import tiny_model, tiny_tokenizer

    prepare(MULTITURN, tmp_path, PrepareSettings(purpose, min_gap=0.0, default_system="Be kind."))
    files = {split: str(tmp_path / f"{purpose}_{split}.parquet") for split in ("train", "validation")}
    loaded = load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    tokenizer = tiny_tokenizer(["the", "answer", "is", "help", "me", "you"])
    tokenizer.save_pretrained(tmp_path / "tiny")
    tiny_model(TinyConfig(), tokenizer, 0).save_pretrained(tmp_path / "tiny")
    config, trainer = {"sft": (trl.SFTConfig, trl.SFTTrainer), "dpo": (trl.DPOConfig, trl.DPOTrainer)}[purpose]
    common: dict[str, object] = {
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
    }
    common |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no"}
    job = trainer(
        model=str(tmp_path / "tiny"),
        args=config(output_dir=str(tmp_path / "run"), **common),
        train_dataset=loaded["train"],
        eval_dataset=loaded["validation"],
        processing_class=tokenizer,
    )
    job.train()
    losses = [entry for entry in job.state.log_history if "eval_loss" in entry]
    assert job.state.global_step == 1 and losses and losses[0]["eval_loss"] > 0
