"""Contracts with verl besides those of `test_verl.py` and `test_verl_backend.py`: program, queue, files, SFT.

One test per hook. Everything that an adapter imports from verl is looked up by name, so that a new hook is not
forgotten.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

from tests.verl.test_verl import composed

ADAPTERS = Path(__file__).parents[2] / "upshot" / "verl" / "adapters"


def parameters(function: Any) -> set[str]:
    """The names of a function's parameters."""
    return set(inspect.signature(function).parameters)


def source(thing: Any) -> str:
    """The source of an object, or of a Ray actor's class."""
    meta = getattr(thing, "__ray_metadata__", None)
    return inspect.getsource(meta.modified_class if meta is not None else thing)


def imported() -> set[str]:
    """Every name of verl's and TransferQueue's that an adapter imports, as module:name."""
    found = set()
    for path in ADAPTERS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("verl", "transfer_queue"):
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("name", sorted(imported()))
def test_everything_we_import_from_verl_exists(name: str) -> None:
    import importlib

    module, thing = name.split(":")
    found = importlib.import_module(module)
    assert hasattr(found, thing) or importlib.import_module(name.replace(":", "."))


def test_the_program_is_started_by_these_names() -> None:
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    assert {"config", "task_runner_class"} <= parameters(run_ppo)
    assert {"config", "use_reference_policy", "use_critic"} <= parameters(validate_config)
    assert [len(parameters(f)) for f in (need_critic, need_reference_policy, auto_set_device)] == [1, 1, 1]
    assert {"self", "config"} <= parameters(TaskRunnerV1.__ray_metadata__.modified_class.run)
    for words in ("task_runner_class.remote()", "runner.run.remote(config)", "ray.is_initialized()"):
        assert words in source(run_ppo), words  # what `Overseen` replaces


def test_validation_of_the_config_takes_what_we_compose() -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    _, config = composed("train.kl=0.1")
    assert need_reference_policy(config) and not need_critic(config)
    validate_config(config=config, use_reference_policy=True, use_critic=False)


def test_rows_of_the_queue_are_read_written_and_cleared_by_these_names() -> None:
    import transfer_queue as tq
    from transfer_queue import KVBatchMeta

    assert {"keys", "partition_id", "select_fields"} <= parameters(tq.kv_batch_get)
    assert {"keys", "partition_id", "fields"} <= parameters(tq.kv_batch_put)
    assert {"keys", "partition_id"} <= parameters(tq.kv_clear)
    names = {field.name for field in fields(KVBatchMeta)} if is_dataclass(KVBatchMeta) else parameters(KVBatchMeta)
    assert {"partition_id", "keys", "tags"} <= names


def test_a_rows_key_names_prompt_and_reply_and_its_tag_length_and_padding() -> None:
    from verl.trainer.ppo.v1 import agent_loop_tq, trainer_base

    written = inspect.getsource(agent_loop_tq)
    assert 'f"{uid}_{session_id}_{i}"' in written and '"seq_len"' in written and "extra_fields" in written
    assert "is_padding" in inspect.getsource(trainer_base)


def test_the_buffer_is_asked_for_rows_by_these_names() -> None:
    from verl.trainer.ppo.v1 import replay_buffer, trainer_base

    kinds = [kind for _, kind in inspect.getmembers(replay_buffer, inspect.isclass) if hasattr(kind, "sample")]
    assert kinds and all({"global_steps", "partition_id", "batch_size"} <= parameters(kind.sample) for kind in kinds)
    build = inspect.getsource(trainer_base.PPOTrainer._build_replay_buffer)
    assert "trainer_mode" in build and "sync" in build  # by which ours chooses the synchronous one


def test_the_trainer_has_what_ours_reads_of_it() -> None:
    from verl.trainer.ppo.v1 import trainer_base

    text = inspect.getsource(trainer_base)
    for name in (
        "train_dataset",
        "global_steps",
        "actor_rollout_wg",
        "use_reference_policy",
        "use_critic",
        "tokenizer",
    ):
        assert f"self.{name}" in text, name
    assert "_query_dispatch_info" in text and "global_steps" in inspect.getsource(
        trainer_base.PPOTrainer._submit_batch_to_rollout
    )


def test_a_batch_of_rows_is_made_by_verls_own_functions() -> None:
    import numpy as np
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.rl_dataset import collate_fn

    rows = [{"raw_prompt": [{"role": "user", "content": "hi"}], "extra_info": {"id": str(n)}} for n in range(2)]
    batch = collate_fn(rows)
    batch["uid"] = np.array(["a", "b"], dtype=object)
    found = tu.get_tensordict(batch)
    tu.assign_non_tensor_data(found, "global_steps", 3)
    assert len(found) == 2 and found["global_steps"] == 3


def test_the_rows_data_set_keeps_our_extra_info() -> None:
    from verl.utils.dataset import rl_dataset

    text = inspect.getsource(rl_dataset.RLHFDataset)
    assert "self.dataframe" in text and "extra_info" in text


def test_checkpoints_lie_where_resume_and_export_look_for_them() -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils.checkpoint import checkpoint_manager, fsdp_checkpoint_manager

    save = inspect.getsource(PPOTrainer._save_checkpoint)
    assert 'f"global_step_{self.global_steps}"' in save and '"actor"' in save
    assert "latest_checkpointed_iteration.txt" in inspect.getsource(checkpoint_manager)
    shards = inspect.getsource(fsdp_checkpoint_manager)
    assert 'f"model_world_size_{self.world_size}_rank_{self.rank}.pt"' in shards and '"huggingface"' in shards


def test_agent_loop_workers_are_spread_over_the_nodes_that_have_cpus() -> None:
    from verl.experimental.agent_loop import agent_loop

    text = inspect.getsource(agent_loop)
    assert 'node["Resources"].get("CPU", 0) > 0' in text and "NodeAffinitySchedulingStrategy" in text


def test_a_step_is_trained_before_it_is_saved_and_its_numbers_are_asked_for_last() -> None:
    """Our trainer writes the line of a step when `step` has ended, and that of an evaluation in `_compute_metrics`."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    text = inspect.getsource(PPOTrainer.fit)
    loop = text[text.index("while current_epoch") :]
    marks = ["self.step(metrics, self.timing_raw)", "self._save_checkpoint()", "self._validate()"]
    marks += ["self._compute_metrics(batch, metrics, self.timing_raw"]
    assert all(mark in loop for mark in marks)
    assert sorted(marks, key=loop.index) == marks
    assert text.index("self._validate()") < text.index("self.on_train_begin()"), "one before the first step"
    wanted = {"batch", "metrics", "timing_raw", "global_steps", "epoch"}
    assert wanted <= parameters(PPOTrainer._compute_metrics)


def test_a_data_set_of_our_own_is_made_as_verl_makes_one() -> None:
    from verl.trainer.ppo import utils

    from upshot.verl.adapters.dataset import RowIds

    made = inspect.getsource(utils.create_rl_dataset)
    for name in ("data_files", "tokenizer", "config", "processor", "max_samples"):
        assert name in parameters(RowIds.__init__) and f"{name}=" in made, name


def test_a_mistyped_key_gets_hydras_own_message_before_anything_starts() -> None:
    from upshot.verl.adapters.composing import find_fault

    assert find_fault(["trainer.n_gpus_per_node=2"]) is None
    said = find_fault(["trainer.n_gpu_per_node=2"]) or ""
    assert "Could not override 'trainer.n_gpu_per_node'" in said and "not in struct" in said
