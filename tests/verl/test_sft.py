"""Supervised training on verl: its config, and rows that are local mode's examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe, TinyConfig
from upshot.core.errors import UserError
from upshot.models.rendering import Renderer
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.tasks.slots import SlotsTask
from upshot.training.loops.sft import Dialogues
from upshot.verl.config import compose
from upshot.verl.plan import ClusterPlace
from upshot.verl.prepare import prepare
from upshot.verl.sft import CARRIED, ENTRY

TASK = SlotsTask(rows_per_split=64)
TOKENIZER = tiny_tokenizer(TASK.vocabulary())
OWN = ("task.rows_per_split=64", "train.method=sft", "warm_start=null", "train.prompts_per_step=8")


def made(*words: str) -> Recipe:
    return load_recipe("quickstart", ["credit.by=reply", *OWN, "model.path=/model", *words]).recipe


def test_the_recipe_is_the_sft_trainers_config_and_every_value_says_where_it_came_from() -> None:
    plan = compose(
        made("train.epochs=2", "train.steps=0"), ClusterPlace("/run", 64, None, 256), ["trainer.n_gpus_per_node=4"]
    )
    plan.check()
    assert plan.value("trainer.total_training_steps") == 16 and plan.value("data.train_batch_size") == 8
    assert plan.value("optim.lr") == made().train.lr and "optim.lr=0.0004    ← train.lr" in plan.page()
    assert plan.program == ("torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", ENTRY)
    assert {line.theirs for line in CARRIED} <= {setting.key for setting in plan.settings}


def test_on_a_cpu_it_computes_in_float32_like_local_mode() -> None:
    plan = compose(made(), ClusterPlace("/run", 64, None, 256), [], local=True)
    assert plan.value("trainer.device") == "cpu" and plan.value("engine.mixed_precision")["param_dtype"] == "fp32"


@pytest.mark.parametrize(
    ("words", "theirs", "why"),
    [
        (["train.length_norm=sequence"], [], "mean over tokens"),
        ([], ["trainer.n_gpus_per_node=3"], "as many rows on each of 3 ranks"),
        ([], ["trainer.nnodes=2"], "torchrun on one node"),
        (["train.save.best=eval/loss/nll", "eval.every=1"], [], "keeps the newest"),
        (["train.schedule=linear"], [], "no schedule 'linear'"),
        (["model.lora={r: 4, dropout: 0.1}"], [], "no dropout"),
    ],
)
def test_what_verls_sft_trainer_has_not_is_refused_by_name(words: list[str], theirs: list[str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        compose(made(*words), ClusterPlace("/run", 64, None, 256), theirs).check()


def test_the_rows_are_the_ids_and_masks_that_local_mode_trains(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    module = tiny_model(TinyConfig(hidden=16, layers=1, heads=2, mlp=32), TOKENIZER, 0)
    module.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    recipe = made(f"model.path={tmp_path / 'model'}", "eval.every=2", "eval.rows=5", f"run_dir={tmp_path / 'run'}")
    place = prepare(recipe, tmp_path / "run")
    local = Dialogues(TASK.dialogues("train"), Renderer(TOKENIZER), 256, TASK.tools())
    rows = pq.read_table(tmp_path / "run/data/sft-train.parquet").to_pylist()
    assert place.rows == len(rows) == len(local)
    assert all(row["ids"] == datum.ids and row["mask"] == datum.mask for row, datum in zip(rows, local, strict=True))
    assert pq.read_table(tmp_path / "run/data/sft-validation.parquet").num_rows == 5
