"""verl's sharded checkpoints as Hugging Face folders, and resuming from them. Shards are written as FSDP2 does it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from upshot.cli import main
from upshot.config.load import load_recipe
from upshot.config.recipe import TinyConfig
from upshot.core.errors import UserError
from upshot.models.local import load_whole
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.offline.arguments import read_model
from upshot.run.folder import RunFolder
from upshot.tasks.slots import SlotsTask
from upshot.verl import merge
from upshot.verl.checkpoints import check_ranks, make_whole, newest_step, saved_steps
from upshot.verl.merge import join_parts, read_shards, write_merged

TOKENIZER = tiny_tokenizer(SlotsTask(rows_per_split=64).vocabulary())


@contextmanager
def rank_of(rank: int, shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """One of several ranks that never communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = int(torch.tensor(shape).prod())
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
    finally:
        dist.destroy_process_group()


def shard(weights: dict[str, torch.Tensor], folder: Path, ranks: int = 2, copies: int = 1) -> None:
    """Write weights as the ranks of FSDP2 do; with copies, as HSDP does."""
    shape = (copies, ranks) if copies > 1 else (ranks,)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks * copies):
        with rank_of(rank, shape) as mesh:
            placements = [Replicate(), Shard(0)] if copies > 1 else [Shard(0)]
            state: dict[str, Any] = {}
            for name, weight in weights.items():
                parts = list(weight.chunk(ranks)) + [weight[:0]] * ranks
                local = parts[rank % ranks].clone()
                shape_of: dict[str, Any] = {"shape": weight.shape, "stride": weight.stride()}
                state[name] = DTensor.from_local(local, mesh, placements, run_check=False, **shape_of)
            torch.save(state, folder / f"model_world_size_{ranks * copies}_rank_{rank}.pt")


def model(dtype: torch.dtype = torch.float32) -> Any:
    return tiny_model(TinyConfig(hidden=16, layers=1, heads=2, mlp=32), TOKENIZER, 0).to(dtype)


def save(folder: Path, module: Any, **more: int) -> None:
    """A folder of shards with the files that verl puts beside them."""
    shard(dict(module.state_dict()), folder, **more)
    module.config.save_pretrained(folder / "huggingface")
    TOKENIZER.save_pretrained(folder / "huggingface")


@pytest.mark.parametrize("more", [{"ranks": 1}, {"ranks": 2}, {"ranks": 3}, {"ranks": 2, "copies": 2}], ids=str)
def test_the_shards_of_all_ranks_are_joined_to_the_weights(tmp_path: Path, more: dict[str, int]) -> None:
    module = model()
    save(tmp_path / "actor", module, **more)
    (tmp_path / "out").mkdir()
    write_merged(tmp_path / "actor", tmp_path / "out", "base")
    found, _ = load_whole(str(tmp_path / "out"), "float32", "cpu")
    for (name, one), other in zip(module.named_parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors"), "tied to the embedding"


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_every_weight_keeps_the_type_it_was_trained_in_and_the_config_says_so(
    tmp_path: Path, kind: torch.dtype
) -> None:
    save(tmp_path / "actor", model(kind))
    config = tmp_path / "actor/huggingface/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float16"}))
    (tmp_path / "out").mkdir()
    write_merged(tmp_path / "actor", tmp_path / "out", "base")
    assert {weight.dtype for weight in load_file(tmp_path / "out/model.safetensors").values()} == {kind}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == str(kind).removeprefix("torch.")


def test_large_models_are_written_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "FILE_BYTES", 4000)
    module = model()
    save(tmp_path / "actor", module)
    (tmp_path / "out").mkdir()
    write_merged(tmp_path / "actor", tmp_path / "out", "base")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    found, _ = load_whole(str(tmp_path / "out"), "float32", "cpu")
    assert torch.equal(found.model.norm.weight, module.model.norm.weight)
    assert torch.equal(found.lm_head.weight, module.lm_head.weight)


def test_a_head_no_longer_tied_to_its_embedding_is_written_and_the_config_says_so(tmp_path: Path) -> None:
    weights = {name: weight.clone() for name, weight in model().state_dict().items()}
    weights["lm_head.weight"] += 1
    save(tmp_path / "actor", model())
    shard(weights, tmp_path / "actor")
    (tmp_path / "out").mkdir()
    write_merged(tmp_path / "actor", tmp_path / "out", "base")
    found, _ = load_whole(str(tmp_path / "out"), "float32", "cpu")
    assert torch.equal(found.lm_head.weight, weights["lm_head.weight"])
    assert torch.equal(found.model.embed_tokens.weight, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("beside", [True, False], ids=["config beside", "config of --model"])
def test_shards_that_were_saved_elsewhere_are_exported(
    tmp_path: Path, beside: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    module, run = model(), tmp_path / "elsewhere"
    module.save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    for step in (9, 40):
        with torch.no_grad():
            module.model.norm.weight.fill_(step)
        save(run / f"global_step_{step}" / "actor", module)
        if not beside:
            shutil.rmtree(run / f"global_step_{step}" / "actor" / "huggingface")
    words = ["export", str(run), "--out", str(tmp_path / "out")]
    if not beside:
        assert main(words) == 2 and "name the model it was made from with --model" in capsys.readouterr().err
    assert main([*words, "--model", str(tmp_path / "base")]) == 0
    found, _ = load_whole(str(tmp_path / "out"), "float32", "cpu")
    assert torch.equal(found.model.norm.weight, module.model.norm.weight)  # the newest
    actor = str(run / "global_step_9" / "actor")
    assert main(["export", actor, "--model", str(tmp_path / "base"), "--out", str(tmp_path / "nine")]) == 0
    assert load_whole(str(tmp_path / "nine"), "float32", "cpu")[0].model.norm.weight[0] == 9


def test_adapters_stay_adapters_that_peft_reads(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = model()
    base.save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight)
    actor = tmp_path / "actor"
    save(actor, adapted)
    (actor / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM"}))
    (tmp_path / "out").mkdir()
    write_merged(actor, tmp_path / "out", str(tmp_path / "base"))
    assert not (tmp_path / "out/model.safetensors").exists()
    ids = torch.tensor([TOKENIZER.encode("here is a small red lamp")])
    found, _ = load_whole(str(tmp_path / "out"), "float32", "cpu")
    with torch.no_grad():
        assert torch.allclose(found(ids).logits, adapted(ids).logits, atol=1e-5)


def test_a_shard_on_another_node_is_reported_as_missing_by_name(tmp_path: Path) -> None:
    save(tmp_path, model())
    (tmp_path / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(UserError, match=r"ranks \[1\].*same storage"):
        read_shards(tmp_path)


def test_a_file_that_is_not_an_fsdp2_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fsdp2"):
        join_parts("weight", [[1.0]])


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of verl with two checkpoints, the second of which was not finished."""
    own = [f"run_dir={tmp_path / 'run'}", "model.path=somewhere", "warm_start=null", "task.rows_per_split=64"]
    folder = RunFolder.create(load_recipe("quickstart", ["credit.by=reply", *own]).recipe)
    (folder.path / "verl.txt").write_text("both sides")
    save(folder.checkpoints.path / "global_step_4/actor", model())
    save(folder.checkpoints.path / "global_step_8/actor", model())
    (folder.checkpoints.path / "latest_checkpointed_iteration.txt").write_text("4")
    folder.append_metrics("rl", 4, {"reward/mean": 0.5})
    return folder


def test_only_what_verl_has_saved_completely_and_kept_is_a_checkpoint(run: RunFolder) -> None:
    (run.checkpoints.path / "global_step_2").mkdir()  # verl leaves the folder of those that it removes
    assert (newest_step(run), saved_steps(run)) == (4, [4])


def test_a_merged_checkpoint_works_in_every_other_command(run: RunFolder) -> None:
    path = make_whole(run)
    latest = run.latest()
    assert latest is not None and latest == (path, "rl", 4)
    assert read_model(str(run.path)) == f"local:{path}"
    assert make_whole(run, "rl-000004") == path and make_whole(run, "8") is None


def test_export_merges_what_verl_saved(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run.path), "--checkpoint", "4"]) == 0
    out = Path(capsys.readouterr().out.strip())
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= {path.name for path in out.iterdir()}
    module, _ = load_whole(str(out), "float32", "cpu")
    assert torch.equal(module.model.norm.weight, model().model.norm.weight)


def test_a_checkpoint_cannot_be_resumed_on_another_number_of_ranks(run: RunFolder) -> None:
    check_ranks(run, 2)
    with pytest.raises(UserError, match="saved by 2 ranks and there are 8"):
        check_ranks(run, 8)


def test_neither_engine_resumes_a_run_of_the_other(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", str(run.path)]) == 2
    assert f"--engine verl --resume {run.path}" in capsys.readouterr().err
    other = RunFolder.create(load_recipe("quickstart", ["credit.by=reply", f"run_dir={tmp_path / 'local'}"]).recipe)
    assert main(["train", "--engine", "verl", "--resume", str(other.path)]) == 2
    assert "without --engine verl" in capsys.readouterr().err


def test_a_new_run_in_the_folder_of_a_failed_start_is_not_taken_for_verls(run: RunFolder) -> None:
    (run.path / "metrics.jsonl").unlink()
    again = RunFolder.create(run.recipe)
    assert not (again.path / "verl.txt").exists() and saved_steps(again) == []
