"""Contracts with verl as installed by pip, one test per hook that we use. Run by `make test-cluster`, skipped without
verl."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

from tests.verl.test_worker import HALF_SAID, TOKENIZER, Manager, Output, shopkeeper
from upshot.config.load import load_recipe
from upshot.core.errors import BudgetExceeded, UserError
from upshot.run.folder import RunFolder
from upshot.training.learner.distributed.pickling import loads
from upshot.verl.config import compose
from upshot.verl.plan import RECIPE, ClusterPlace
from upshot.verl.rows import record_of
from upshot.verl.worker import describe_place

OWN = ["task.rows_per_split=64", "task.vague=0", "warm_start=null", "model.path=/model", "model.dtype=float32"]
PLACE = ClusterPlace("/run", rows=64, prompt_tokens=40, context=256)
MORE = ["actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=1"]


def composed(*more: str) -> tuple[Any, Any]:
    """Our plan and the verl config made from it."""
    import hydra

    plan = compose(load_recipe("quickstart", ["credit.by=reply", *OWN, *more]).recipe, PLACE, MORE)
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return plan, hydra.compose("ppo_trainer", overrides=plan.overrides())


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(
        load_recipe("quickstart", ["credit.by=reply", *OWN, f"run_dir={tmp_path / 'run'}"]).recipe
    )
    monkeypatch.setenv(RECIPE, str(folder.path / "recipe.yaml"))


@pytest.mark.parametrize("method", ["rl", "ppo"])
def test_every_setting_is_where_verl_reads_it(method: str) -> None:
    from omegaconf import OmegaConf

    plan, theirs = composed(f"train.method={method}", "train.kl=0.1")
    for setting in plan.settings:
        found = OmegaConf.select(theirs, setting.key)
        assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == setting.value, setting.key


@pytest.mark.parametrize("method", ["rl", "ppo"])
def test_another_engine_and_sequence_parallelism_are_not_forced_out(method: str) -> None:
    """Settings that only FSDP has are not set for Megatron, so that hydra composes its config."""
    from upshot.verl.adapters.composing import find_fault

    recipe = load_recipe("quickstart", ["credit.by=reply", *OWN, f"train.method={method}"]).recipe
    sharded = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    plan = compose(recipe, PLACE, [*MORE, "model_engine=megatron", sharded])
    plan.check()
    assert find_fault(plan.overrides()) is None and any("never run" in note for note in plan.notes())
    spread = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"
    assert find_fault(compose(recipe, PLACE, [*MORE, spread]).overrides()) is None
    late = load_recipe("quickstart", ["credit.by=reply", *OWN, "train.schedule=cosine"]).recipe
    with pytest.raises(UserError, match=r"train\.schedule.*megatron has its own schedules"):
        compose(late, PLACE, [*MORE, "model_engine=megatron"]).check()


@pytest.mark.parametrize(
    ("schedule", "steps_apart"),
    [
        ("{name: constant}", 0),
        ("{name: constant, warmup_steps: 4}", 0),
        ("{name: cosine, min_lr: 0.1}", 0),
        ("{name: cosine, warmup_steps: 4}", 1),
        ("{name: cosine, warmup_steps: 0.2}", 1),
    ],
)
def test_the_rate_of_every_step_is_that_of_local_mode(schedule: str, steps_apart: int) -> None:
    """verl's cosine counts from 0 or from 1: with a warm-up its decay is a step ahead."""
    import torch
    from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

    from upshot.training.learner.learner import learning_rate

    _, theirs = composed(f"train.schedule={schedule}", "train.steps=20")
    given = theirs.actor_rollout_ref.actor.optim
    warm = given.lr_warmup_steps or int(given.lr_warmup_steps_ratio * 20)  # as its engine does
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=given.lr)
    if given.lr_scheduler_type == "constant":
        found = get_constant_schedule_with_warmup(optimizer, num_warmup_steps=warm)
    else:
        found = get_cosine_schedule_with_warmup(
            optimizer,
            num_warmup_steps=warm,
            num_training_steps=20,
            min_lr_ratio=given.min_lr_ratio,
            zero_indexed_step=given.zero_indexed_step,
        )
    config = load_recipe("quickstart", [f"train.schedule={schedule}", "train.steps=20"]).recipe.train
    for step in range(20):
        ours = learning_rate(config, step if step < warm else step + steps_apart)
        assert found.get_last_lr()[0] == pytest.approx(ours), step
        optimizer.step()
        found.step()


def test_the_registrations_are_under_our_name() -> None:
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.trainer.ppo.v1 import get_trainer_cls

    import upshot.verl.adapters.register
    import upshot.verl.adapters.trainer  # noqa: F401

    assert _agent_loop_registry["upshot"]["_target_"] == "upshot.verl.adapters.loop.UpshotLoop"
    assert get_trainer_cls("upshot").__name__ == "UpshotTrainer"
    assert get_trainer_cls("upshot-ahead").__name__ == "AheadTrainer"


def test_verls_trainer_calls_what_ours_overrides() -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from upshot.verl.adapters.trainer import AheadTrainer, LocalLearning

    own = ("_rows", "_read_measures", "_play_on", "_pick_rows")
    for name, ours in {**vars(AheadTrainer), **vars(LocalLearning)}.items():
        theirs = getattr(PPOTrainer, name, None)
        if callable(ours) and not name.startswith("__") and name not in own:
            assert theirs is not None, f"verl's trainer has no {name} any more"
            wanted = [p for p in inspect.signature(ours).parameters if p not in ("more", "_", "__")]
            assert set(wanted) <= set(inspect.signature(theirs).parameters), name
    step = inspect.getsource(PPOTrainer._step_once)
    order = ["replay_buffer.sample", "_balance_batch", "_compute_old_log_prob", "_compute_advantage", "_update_actor"]
    assert sorted(order, key=step.index) == order


def test_the_program_keeps_verls_runner_and_registers_our_trainer_first() -> None:
    from upshot.verl.adapters.main import ClusterRunner

    assert ClusterRunner.__mro__[1].__name__ == "TaskRunnerV1"
    assert "get_trainer_cls" in inspect.getsource(ClusterRunner.__mro__[1].run)


def test_the_server_client_takes_ids_by_these_names() -> None:
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    assert {"request_id", "prompt_ids", "sampling_params"} <= set(
        inspect.signature(LLMServerClient.generate).parameters
    )
    assert {"token_ids", "log_probs", "stop_reason", "extra_fields"} <= set(TokenOutput.model_fields)


def rows_of(manager: Manager, config: Any, step: int = 1) -> list[Any]:
    """What our loop returns to verl for a row."""
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap

    from upshot.verl.adapters.loop import UpshotLoop

    record = record_of(HALF_SAID, 0, "train")
    given = {
        "raw_prompt": record["raw_prompt"],
        "extra_info": describe_place(record["extra_info"], 0, 0),
        "session_id": 0,
    }

    async def run() -> Any:
        loop = UpshotLoop(DictConfigWrap(config), manager, TOKENIZER, None, None, DictConfigWrap(config.data))
        return await loop.run({"logprobs": True, "repetition_penalty": 1.0}, global_steps=step, uid="u", **given)

    return asyncio.run(run())


@pytest.mark.usefixtures("recipe_file")
def test_the_loop_gives_verl_the_servers_ids_and_the_whole_reply() -> None:
    from upshot.verl.adapters.loop import REPLY

    manager = Manager(shopkeeper(HALF_SAID), TOKENIZER)
    (out,) = rows_of(manager, composed()[1])
    assert out.prompt_ids == manager.asked[0][1] and out.response_ids == manager.asked[0][3]
    assert manager.asked[0][2]["logprobs"] is True and manager.asked[0][2]["max_tokens"] == 12
    assert "seed" not in manager.asked[0][2]  # only our engine uses it
    row = out.as_dict()
    reply = loads(row["extra_fields"][REPLY])
    assert row["rm_scores"].sum().item() == pytest.approx(reply.reward.total.value)
    assert row["extra_fields"]["min_global_steps"] == 1
    assert row["extra_fields"]["reward_extra_info"]["verifier"] == 1.0


@pytest.mark.usefixtures("recipe_file")
def test_a_user_error_reaches_the_trainer() -> None:
    from upshot.verl.adapters.loop import FAULT

    class Silent(Manager):
        async def generate(self, request_id: str, **asked: Any) -> Output:
            return Output([5], None)

    (out,) = rows_of(Silent(shopkeeper(HALF_SAID), TOKENIZER), composed()[1])
    assert "calculate_log_probs" in out.extra_fields[FAULT] and out.response_mask == [0]


@pytest.mark.usefixtures("recipe_file")
@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ExceptionGroup("futures", [ExceptionGroup("scores", [BudgetExceeded("no calls left")])]), "no calls left"),
        (KeyError("odd"), "KeyError: 'odd'; where it was raised is in verl.log"),
    ],
)
def test_any_error_of_a_conversation_reaches_the_trainer(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, told: str
) -> None:
    """verl would log it and continue without the row, or end with its own message."""
    from upshot.verl.adapters.loop import FAULT

    async def play(*_: Any) -> None:
        raise raised

    monkeypatch.setattr("upshot.verl.worker.RolloutWorker.play", play)
    (out,) = rows_of(Manager(shopkeeper(HALF_SAID), TOKENIZER), composed()[1])
    assert out.extra_fields[FAULT] == told


def test_row_fields_have_verls_names_and_padding_trains_nothing() -> None:
    from upshot.verl.adapters.trainer import columns
    from upshot.verl.train_batch import LearnerInputs

    told = [LearnerInputs([1, 0, 1], [0.5, 0.0, -0.5], [-1.0, 0.0, -2.0], weights=[1.0, 0.0, 0.9]), None]
    found = columns(told, "truncate")
    assert [row.tolist() for row in found["response_mask"].unbind()] == [[1, 0, 1], [0]]
    assert [row.tolist() for row in found["advantages"].unbind()] == [[0.5, 0.0, -0.5], [0.0]]
    assert found["returns"].unbind()[0].tolist() == [0.0, 0.0, 0.0]
    assert "rollout_is_weights" in found and "rollout_is_weights" not in columns(told, "none")


def test_on_a_cpu_the_critic_is_loaded_with_the_attention_that_its_config_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    import torch
    from transformers import AutoConfig
    from verl.workers.engine.base import EngineRegistry

    from tests.support.verl_cpu.critic import DEVICE, ValueEngine
    from tests.support.verl_cpu.settings import PLATFORM
    from upshot.config.recipe import TinyConfig
    from upshot.models.tiny import tiny_model

    monkeypatch.setenv("VERL_ENGINE_DEVICE", DEVICE)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", PLATFORM)
    assert EngineRegistry.get_engine_cls("value_model", "fsdp2") is ValueEngine
    policy = tiny_model(TinyConfig(hidden=16, layers=1, heads=2, mlp=32), TOKENIZER, 0)
    policy.save_pretrained(tmp_path)
    named = AutoConfig.from_pretrained(tmp_path, attn_implementation="sdpa")
    off = {"use_liger": False, "use_fused_kernels": False, "fused_kernel_options": None, "trust_remote_code": False}
    own = {"hf_config": named, "local_path": str(tmp_path), "model_type": "value_model", "tiled_mlp": {}, **off}
    engine = object.__new__(ValueEngine)
    engine.model_config = SimpleNamespace(**own, enable_gradient_checkpointing=False, get=lambda *_: None)
    engine.engine_config = SimpleNamespace(model_dtype="fp32", forward_only=False)
    engine.device_mesh, engine.use_remove_padding, engine.ulysses_sequence_parallel_size = None, False, 1
    module = engine._build_module()
    assert module.config._attn_implementation == "sdpa" and engine.model_config.model_type == "value_model"
    same = dict(policy.model.named_parameters())
    assert all(torch.equal(value, same[name]) for name, value in module.model.named_parameters())
    assert module(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 1)
