"""All stages on the CPU with no network: data, the five recipes, the table; and the recipes themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.collabllm.smoke import METHODS
from upshot.cli import main
from upshot.config.load import describe_recipe, find_recipe, load_recipe
from upshot.tasks.datasets.parquet import schema_for, write_parquet

SETTINGS = {"": "math-hard", "-medium": "medium", "-bigcodebench": "bigcodebench"}


def test_from_twenty_goals_to_the_table_by_all_five_recipes(smoked: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    rows = [row[0] for row in smoked["table"]["rows"]]
    assert rows == ["base", "proactive", *METHODS]
    for row in rows:
        assert smoked["table"]["cells"][row]["accuracy"]["n"] == 2
    base = AutoModelForCausalLM.from_pretrained(smoked["checkpoints"]["base"])
    for method in METHODS:
        lines = smoked["metrics"][method]
        assert [line["step"] for line in lines] == [1, 2]
        assert all(line["train/grad_norm"] > 0 for line in lines), f"{method} learned nothing"
        trained = AutoModelForCausalLM.from_pretrained(smoked["checkpoints"][method])
        ids = torch.arange(10, 20)[None]
        assert not torch.equal(trained(ids).logits, base(ids).logits), f"{method} left the model as it was"
    assert smoked["metrics"]["online-dpo"][0]["train/pairs"] > 0
    assert {"loss/value", "value/explained"} <= set(smoked["metrics"]["ppo"][1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_recipe_is_shown_and_planned_offline(
    method: str,
    setting: str,
    tmp_path: Path,
    no_network: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key")  # a dry run checks that it exists, offline too
    name = f"collabllm-{method}{setting}"
    said = [{"role": "user", "content": "Hi"}]
    reply, worse = ([{"role": "assistant", "content": text}] for text in ("Hello", "No"))

    def history(goal: str) -> dict[str, Any]:
        return {"prompt": said, "extra_info": {"interaction_kwargs": {"single_turn_prompt": goal}}}

    examples = {
        "rl_train": history("Do it."),
        "rl_validation": history("Do the other thing."),
        "sft_train": {"messages": [*said, *reply]},
        "dpo_train": {"prompt": said, "chosen": reply, "rejected": worse, "score_chosen": 1.0, "score_rejected": 0.0},
    }
    for file, row in examples.items():
        write_parquet(tmp_path / f"{file}.parquet", [row], schema_for(file.partition("_")[0]))
    own = [f"task.{split}_file={tmp_path}/rl_{split}.parquet" for split in ("train", "validation")]
    if method in ("sft", "dpo"):
        own.append(f"train.data={tmp_path}/{method}_train.parquet")
    assert main(["recipe", "show", name, *own]) == 0
    assert main(["train", name, *own, "--dry-run", "--offline"]) == 0
    assert ", LoRA" in capsys.readouterr().out
    recipe = load_recipe(name).recipe
    assert recipe.name == name and recipe.task.name == SETTINGS[setting]
    assert recipe.model.lora is not None and (recipe.model.lora.r, recipe.model.lora.alpha) == (32, 16)
    metrics = {metric.name: metric.weight for metric in recipe.reward.metrics}
    task_metric = {"": "accuracy", "-medium": "document->bleu", "-bigcodebench": "code->pass_rate"}
    assert next(iter(metrics)) == task_metric[setting]
    assert metrics["token_amount"] == (-1e-4 if setting == "-medium" else -5e-4)
    assert describe_recipe(find_recipe(name)).startswith("CollabLLM by")


def test_the_recipes_hold_the_published_hyper_parameters() -> None:
    found = {method: load_recipe(f"collabllm-{method}").recipe for method in METHODS}
    train = {method: recipe.train for method, recipe in found.items()}
    assert {method: c.lr for method, c in train.items()} == {
        "sft": 1e-5, "dpo": 5e-6, "online-dpo": 5e-6, "ppo": 2e-6, "grpo": 1e-6,
    }  # fmt: skip
    assert (train["sft"].epochs, train["dpo"].epochs, train["dpo"].dpo.beta) == (3, 8, 0.1)
    grpo = found["grpo"]
    assert (grpo.train.prompts_per_step, grpo.train.group_size, grpo.train.minibatches) == (16, 8, 2)
    assert (grpo.train.kl.weight, grpo.train.kl.estimator) == (0.001, "k3")
    assert (grpo.futures.samples, grpo.futures.rounds, grpo.episode.max_tokens) == (3, 2, 2048)
    assert train["online-dpo"].group_size == 2


def test_a_missing_file_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "collabllm-dpo", f"train.data={tmp_path}/none.parquet", "--dry-run"]) == 2
    assert "none.parquet" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "hi", "chosen": "yes"}))
    assert main(["train", "collabllm-dpo", f"train.data={tmp_path}/bad.jsonl", "--dry-run"]) == 2
    assert "row 1 has no 'rejected'" in capsys.readouterr().err
