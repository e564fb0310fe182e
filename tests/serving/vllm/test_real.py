"""With a real vLLM (`make test-vllm`): the stand-in's assumptions. Each server takes a minute to start."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from upshot.config.load import validate_recipe
from upshot.config.recipe import Recipe, TinyConfig
from upshot.config.sampling import Sampling
from upshot.models.base import ModelCallError, Request
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.run import policy_server
from upshot.serving.servers.state import folder_of, read_state
from upshot.serving.vllm import launch
from upshot.serving.vllm.policy import HEADER, VllmPolicy
from upshot.tasks.base import tasks
from upshot.training.bundle import PolicyBundle

PROGRAM = os.environ.get("UPSHOT_VLLM", "")
pytestmark = [
    pytest.mark.skipif(not PROGRAM, reason="no vLLM: `make test-vllm` makes an environment for it"),
    pytest.mark.timeout(1800),
]
SHAPE = {"hidden": 64, "layers": 2, "heads": 2, "mlp": 128, "context": 256}
"""Heads of 32: vLLM has no kernel for smaller ones."""
ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
ENGINE = {"name": "vllm", "program": PROGRAM, "arguments": ["--enforce-eager"], "environment": ON_CPU}
ASK = Request([7, 8, 9, 10], Sampling(max_tokens=12, seed=11))


def base(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "name": "real",
        "run_dir": str(folder),
        "model": {"tiny": SHAPE, "engine": ENGINE, **more.pop("model", {})},
        "task": {"name": "ciphers", "coded": 0},
        "episode": {"max_tokens": 24},
        "warm_start": {"steps": 30, "batch": 16, "lr": 3e-3},
        "train": {"steps": 3, "prompts_per_step": 3, "group_size": 4, "lr": 1e-3, "save": {"every": 1}},
        **more,
    }


def train(file: Path, within_s: float = 900) -> list[dict[str, Any]]:
    """Train a recipe as a user would; returns the lines of its steps."""
    words = [sys.executable, "-m", "upshot.cli", "train", str(file)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=within_s)
    assert ended.returncode == 0, ended.stderr[-3000:] + ended.stdout[-2000:]
    return steps_of(Path(json.loads(file.read_text())["run_dir"]))


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/mean" in line]


@contextmanager
def server(recipe: Recipe, run: Path) -> Iterator[VllmPolicy]:
    """The policy of a recipe, with its server up."""
    run.mkdir()
    with policy_server.serve_policy(recipe, run, print):
        task = tasks.create(recipe.task.name, recipe.task.options, "task")
        sampler = PolicyBundle(recipe, task, run, None, print).sampler
        assert isinstance(sampler, VllmPolicy)
        yield sampler


def own_logprobs(policy: VllmPolicy, ids: tuple[int, ...], temperature: float = 1.0) -> list[float]:
    """Log-probabilities by transformers, on the learner's weights."""
    prompt = list(ASK.prompt)
    with torch.no_grad():
        logits = policy.module.eval()(torch.tensor([[*prompt, *ids]])).logits[0] / temperature
    found = torch.log_softmax(logits, -1)
    return [found[len(prompt) - 1 + i, token].item() for i, token in enumerate(ids)]


def learn(policy: VllmPolicy) -> None:
    with torch.no_grad():
        for weight in policy.module.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.1)
    policy.weights_changed()


def test_ids_log_probabilities_versions_and_a_kill(tmp_path: Path) -> None:
    recipe = validate_recipe(base(tmp_path / "run"))
    with server(recipe, tmp_path / "run") as policy:

        async def work() -> None:
            async with policy:
                [first] = await policy.generate(ASK)
                assert first.version == 0
                assert first.logprobs == pytest.approx(own_logprobs(policy, first.ids), abs=1e-4)
                [warm] = await policy.generate(Request(ASK.prompt, Sampling(12, 0.7, seed=5)))
                assert warm.logprobs == pytest.approx(own_logprobs(policy, warm.ids, 0.7), abs=1e-4)
                scores = await policy.logprobs(list(ASK.prompt), list(first.ids))
                assert scores == pytest.approx(own_logprobs(policy, first.ids), abs=1e-4)
                await _weights_follow(policy, first.ids)
                await _a_killed_server_comes_back(policy, tmp_path / "run")

        asyncio.run(work())
    assert read_state(folder_of(launch.file_of(tmp_path / "run"))) is None


async def _weights_follow(policy: VllmPolicy, before: Any) -> None:
    """A step changes the next sample; a request for the previous weights is refused."""
    learn(policy)
    [after] = await policy.generate(ASK)
    assert after.version == 1 and after.ids != before
    assert after.logprobs == pytest.approx(own_logprobs(policy, after.ids), abs=1e-4)
    headers, policy.endpoint.headers = policy.endpoint.headers, {HEADER: "0"}
    with pytest.raises(ModelCallError, match="stale weights"):
        await policy.endpoint.generate(ASK)
    policy.endpoint.headers = headers
    many = await asyncio.gather(*(policy.generate(ASK) for _ in range(8)))
    assert {completion.version for [completion] in many} == {1}


async def _a_killed_server_comes_back(policy: VllmPolicy, run: Path) -> None:
    learn(policy)
    state = read_state(folder_of(launch.file_of(run)))
    assert state is not None
    await policy.generate(ASK)
    os.kill(state["servers"]["policy"]["pid"], signal.SIGKILL)
    began = time.monotonic()
    [found] = await policy.generate(ASK)
    print(f"back after {time.monotonic() - began:.0f} s")
    assert found.version == 2
    assert found.logprobs == pytest.approx(own_logprobs(policy, found.ids), abs=1e-4)


def test_adapters_are_hot_swapped(tmp_path: Path) -> None:
    recipe = validate_recipe(base(tmp_path / "run", model={"lora": {"r": 4, "dropout": 0.0}}))
    with server(recipe, tmp_path / "run") as policy:

        async def work() -> None:
            async with policy:
                for version in range(3):
                    [found] = await policy.generate(ASK)
                    assert found.version == version and policy.endpoint.served == f"policy-{version}"
                    assert found.logprobs == pytest.approx(own_logprobs(policy, found.ids), abs=1e-4)
                    learn(policy)

        asyncio.run(work())


def test_a_recipe_is_trained_with_its_policy_on_vllm(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(base(tmp_path / "run")))
    lines = train(file)
    assert len(lines) == 3
    for line in lines:
        assert math.isfinite(line["reward/mean"]) and line["policy/drift_max"] < 1e-3
        assert line["policy/importance"] == pytest.approx(1.0, abs=1e-3)
    print([{key: line[key] for key in ("policy/drift", "policy/drift_max", "time/sync")} for line in lines])


def test_two_engines_side_by_side_are_a_recipes_user_and_classmates(tmp_path: Path) -> None:
    words = tasks.create("ciphers", {"coded": 0}, "task").vocabulary()
    assert words is not None
    for seed, name in enumerate(("one", "two")):
        tokenizer = tiny_tokenizer(words)
        tiny_model(TinyConfig.model_validate(SHAPE), tokenizer, seed).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    each = {"engine": "vllm", "program": PROGRAM, "devices": "cpu", "environment": ON_CPU}
    each["arguments"] = ["--enforce-eager", "--dtype", "float32", "--generation-config", "vllm"]
    servers = {name: {"model": str(tmp_path / name), **each} for name in ("one", "two")}
    (tmp_path / "servers.yaml").write_text(json.dumps({"servers": servers}))
    shared = {"serve": str(tmp_path / "servers.yaml"), "model": {"engine": "upshot"}}
    talk = {"rounds": 1, "user": "tests.serving.vllm.words_user:WordsUser"}
    mates = {"name": "classmates", "classmates": ["one", "two"], "max_tokens": 6}
    keep = subprocess.Popen([sys.executable, "-m", "upshot.cli", "serve", str(tmp_path / "servers.yaml")])
    try:
        for name, futures, models in (
            ("talk", talk, {"user": "serve:one"}),
            ("mates", mates, {"user": "serve:one", "one": "serve:one", "two": "serve:two"}),
        ):
            file = tmp_path / f"{name}.yaml"
            file.write_text(json.dumps(base(tmp_path / name, futures=futures, models=models, **shared)))
            lines = train(file)
            assert len(lines) == 3 and all(math.isfinite(line["reward/mean"]) for line in lines)
            asked = {key: value for key, value in lines[-1].items() if key.endswith("/calls")}
            print(name, asked)
            assert asked and all(value > 0 for value in asked.values())
    finally:
        keep.send_signal(signal.SIGTERM)
        keep.wait(60)
