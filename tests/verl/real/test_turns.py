"""Several turns and adapters inside Ray."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from tests.verl.real.test_learning import trains
from tests.verl.real.verl_run import locally, verl_run
from upshot.cli import main
from upshot.core import jsonl


def test_turns_with_credit_of_their_own_train_adapters(tmp_path: Path) -> None:
    few = ("train.steps=60", "train.save.every=0", "warm_start=null", "train.method=sft")
    locally(tmp_path / "base", *few, recipe="gsm8k-turns")
    (base,) = (tmp_path / "base" / "checkpoints").glob("sft-*")
    own = (f"model.path={base}", "model.lora={r: 8, dropout: 0}", "warm_start=null", "episode.max_tokens=64")
    more = ("train.prompts_per_step=4", "train.group_size=4", "train.steps=2", "eval.every=0", "train.save.every=2")
    run = verl_run(tmp_path / "run", *own, *more, recipe="gsm8k-turns", ranks=1)
    trains(run, 2, within=0.01)  # verl rounds merged weights to bfloat16 on their way to the servers
    lines = jsonl.read(run.folder / "rollouts.jsonl")
    several = [[span["advantage"] for span in line["credit"]] for line in lines if len(line["credit"]) > 1]
    assert any(len(set(advantages)) > 1 for advantages in several), "a turn has an advantage of its own"
    assert main(["export", str(run.folder), "--out", str(tmp_path / "out")]) == 0
    adapters = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any(weight.abs().max() > 0 for name, weight in adapters.items() if "lora_B" in name), "they have learned"
