"""Contracts with verl's SFT trainer and its checkpoints. Run by `make test-cluster`, skipped without verl."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

from upshot.config.load import load_recipe
from upshot.models.rendering import Renderer
from upshot.models.tiny import tiny_tokenizer
from upshot.tasks.slots import SlotsTask
from upshot.training.loops.minibatches import pick
from upshot.training.loops.sft import Dialogues
from upshot.verl.checkpoints import NEWEST
from upshot.verl.config import compose
from upshot.verl.merge import SHARD
from upshot.verl.metrics import OURS
from upshot.verl.plan import ClusterPlace
from upshot.verl.sft import ENTRY, write_examples

OWN = ["task.rows_per_split=64", "train.method=sft", "warm_start=null", "model.path=/model", "eval.every=2"]


@pytest.mark.parametrize("local", [False, True])
def test_every_setting_is_a_key_of_the_sft_trainers_config(local: bool) -> None:
    import hydra
    from omegaconf import OmegaConf

    plan = compose(load_recipe("quickstart", OWN).recipe, ClusterPlace("/run", 64, None, 256), [], local)
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        theirs = hydra.compose("sft_trainer_engine", overrides=plan.overrides())
    for setting in plan.settings:
        found = OmegaConf.select(theirs, setting.key)
        assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == setting.value, setting.key


def test_verl_finds_our_rows_by_its_own_hook_and_they_are_local_modes(tmp_path: Path) -> None:
    from omegaconf import OmegaConf
    from verl.trainer.sft_trainer import create_sft_dataset

    task = SlotsTask(rows_per_split=64)
    renderer = Renderer(tiny_tokenizer(task.vocabulary()))
    write_examples(tmp_path / "rows.parquet", task.dialogues("train"), renderer, 256, task)
    config = OmegaConf.create({"custom_cls": {"path": f"pkg://{ENTRY}", "name": "Examples"}})
    found = create_sft_dataset(str(tmp_path / "rows.parquet"), config, None, None)
    local = Dialogues(task.dialogues("train"), renderer, 256, task.tools())
    assert len(found) == len(local)
    for row, datum in zip((found[n] for n in range(len(found))), local, strict=True):
        assert (row["input_ids"].tolist(), row["loss_mask"].tolist()) == (datum.ids, datum.mask)
    assert not found[len(found)]["loss_mask"].any(), "what fills up a rank teaches nothing"


def test_the_ranks_of_a_step_take_together_what_local_mode_takes() -> None:
    from upshot.verl.adapters.sft import RankOrder

    ranks = [list(RankOrder(size=10, steps=3, batch=4, seed=7, rank=rank, ranks=2)) for rank in (0, 1)]
    for step in range(3):
        own = [one for order in ranks for one in order[2 * step : 2 * step + 2]]
        assert sorted(own) == sorted(pick(10, 4, step, 7))


def test_verls_sft_trainer_calls_what_ours_overrides() -> None:
    from verl.trainer.sft_trainer import SFTTrainer

    from upshot.verl.adapters.sft import SftTrainer

    assert "_build_dataloader" in vars(SftTrainer) and "_build_dataloader()" in inspect.getsource(SFTTrainer.__init__)
    fit = inspect.getsource(SFTTrainer.fit)
    for used in ("self.train_sampler.set_epoch", "self.train_dataloader", "self.val_dataloader", '"val/loss"'):
        assert used in fit
    assert "val/loss" in OURS and 'metrics[f"train/{k}"]' in fit


def test_verl_names_its_shards_and_its_newest_checkpoint_as_we_read_them() -> None:
    from verl.utils.checkpoint import fsdp_checkpoint_manager as manager
    from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

    source = inspect.getsource(manager.FSDPCheckpointManager.save_checkpoint)
    assert 'f"model_world_size_{self.world_size}_rank_{self.rank}.pt"' in source and '"huggingface"' in source
    assert SHARD.fullmatch("model_world_size_16_rank_3.pt")
    assert get_checkpoint_tracker_filename("/run").endswith(NEWEST)
