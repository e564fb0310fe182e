"""The run's own vLLM server: its arguments, and what is refused before it starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.training.workshop import recipe
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.run import policy_server
from upshot.run.checks import vllm as checks
from upshot.run.checks.context import CheckContext
from upshot.training.bundle import check_beside
from upshot.training.learner.memory.plan import MemoryPart, MemoryPlan, MemorySetting

TINY = {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32}}


def made(folder: Path, engine: Any = "vllm", model: dict[str, Any] | None = None, **more: Any) -> Recipe:
    train = more.pop("train", {})
    return recipe(folder, more={"model": {**TINY, "engine": engine, **(model or {})}, **more}, **train)


def words(recipe: Recipe) -> str:
    return " ".join(policy_server.server_of(recipe, "m").arguments)


def test_a_server_of_whole_weights_loads_none_and_waits_for_the_learners(tmp_path: Path) -> None:
    server = policy_server.server_of(made(tmp_path), "m")
    told = " ".join(server.arguments)
    assert "--load-format dummy" in told and "--dtype float32" in told and "--max-model-len 256" in told
    assert "--generation-config vllm" in told and "--logprobs-mode processed_logprobs" in told
    assert server.devices == "cpu" and server.environment["PYTHONPATH"] == str(policy_server.INSIDE)
    assert {file.name for file in policy_server.INSIDE.glob("upshot_*.py")} == {"upshot_gate.py", "upshot_hands.py"}


def test_a_server_of_adapters_loads_the_model_and_makes_room_for_their_rank(tmp_path: Path) -> None:
    told = words(made(tmp_path, model={"lora": {"r": 12}}))
    assert "--enable-lora" in told and "--max-lora-rank 16" in told and "dummy" not in told


def test_log_probabilities_are_requested_as_the_learner_computes_them(tmp_path: Path) -> None:
    assert "processed_logprobs" in words(made(tmp_path, episode={"temperature": 0.7}))
    assert "raw_logprobs" in words(made(tmp_path, episode={"top_p": 0.9}))
    both = CheckContext(made(tmp_path, episode={"temperature": 0.7, "top_k": 5}))
    assert any("after the cut" in finding.says for finding in checks.check(both))


def test_the_users_arguments_and_variables_come_last(tmp_path: Path) -> None:
    engine = {"name": "vllm", "arguments": ["--max-num-seqs", 8], "environment": {"A": 1, "PYTHONPATH": "/x"}}
    server = policy_server.server_of(made(tmp_path, engine), "m")
    assert server.arguments[-2:] == ["--max-num-seqs", "8"] and server.environment["A"] == "1"
    assert server.environment["PYTHONPATH"].endswith(":/x")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"engine": {"name": "vllm", "program": "/no/vllm"}}, "there is no program '/no/vllm'"),
        (
            {"engine": {"name": "vllm", "devices": [7], "program": sys.executable}},
            "model.engine.devices: there is no GPU 7",
        ),
        ({"engine": {"name": "vllm", "arguments": ["--port", 1]}}, "'--port' is set by the key 'port'"),
        ({"train": {"async_steps": 1}}, "holds one version of the weights"),
    ],
)
def test_settings_that_cannot_work_are_reported_before_anything_starts(
    tmp_path: Path, more: dict[str, Any], says: str
) -> None:
    findings = [finding.says for finding in checks.check(CheckContext(made(tmp_path, **more)))]
    assert any(says in finding for finding in findings), findings


def test_several_processes_are_refused(tmp_path: Path) -> None:
    findings = [finding.says for finding in checks.check(CheckContext(made(tmp_path), ranks=2))]
    assert any("samples for one process, but 2 train" in finding for finding in findings)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"engine": {"memory": 0.5}}, "apply only to the engine vllm"),
        ({"engine": "vllm", "exact": True}, "kernels differ from the learner's"),
        ({"engine": "vllm", "quantize": "4bit", "lora": {}}, "round the weights differently"),
        ({"engine": "vllm", "lora": {"kind": "dora"}}, "neither DoRA"),
        ({"engine": "vllm", "lora": {"targets": ["lm_head"]}}, "nor adapters on embedding or head"),
    ],
)
def test_what_vllm_cannot_sample_as_the_learner_computes_it_is_refused(model: dict[str, Any], says: str) -> None:
    from upshot.config.load import validate_recipe

    with pytest.raises(UserError, match=says):
        validate_recipe({"task": {"name": "slots"}, "model": model})


def test_with_vllm_importance_weights_are_on_unless_the_recipe_turns_them_off(tmp_path: Path) -> None:
    assert made(tmp_path).train.importance.rule == "truncate"
    assert made(tmp_path, train={"importance": {"high": 3.0}}).train.importance.rule == "truncate"
    assert made(tmp_path, train={"importance": "none"}).train.importance.rule == "none"
    assert made(tmp_path, "upshot").train.importance.rule == "none"


def test_the_servers_memory_is_not_counted_twice(tmp_path: Path) -> None:
    from upshot.training.learner.memory.fit import plan_recipe

    recipes = {engine: made(tmp_path, engine) for engine in ("upshot", "vllm")}
    for asked in recipes.values():
        asked.model.memory_gb = 8
    parts = {engine: plan_recipe(asked, 50) for engine, asked in recipes.items()}
    names = {engine: {part.name for part in plan.parts} if plan else set() for engine, plan in parts.items()}
    assert "keys and values" in names["upshot"] and "keys and values" not in names["vllm"]


def test_on_the_learners_gpu_there_must_be_room_for_an_awake_vllm() -> None:
    parts = (MemoryPart("weights", 30, 30, ""), MemoryPart("activations", 0, 50, ""))
    plan = MemoryPlan(MemorySetting(1, "none"), 0, {}, tuple(replace(p, sampling=p.sampling * 2**30) for p in parts), 0)
    check_beside(plan, 0.4, 80 * 2**30)
    with pytest.raises(UserError, match=r"0\.7 of 80\.0 GiB is 56\.0, and the learner keeps 30\.0"):
        check_beside(plan, 0.7, 80 * 2**30)


def test_a_new_tiny_model_is_saved_for_the_server_and_a_run_without_sampling_has_none(tmp_path: Path) -> None:
    folder = Path(policy_server.model_of(made(tmp_path), tmp_path))
    assert (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()
    assert not policy_server.needs_server(made(tmp_path, train={"method": "sft"})) and not policy_server.needs_server(
        made(tmp_path, "upshot")
    )
