"""Classmate training end to end: three classmates with different tokenizers, one behind HTTP; killed and resumed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.test_classmates import ROWS, Recites, context, thinks
from tests.run.test_run import Interrupted, Stops, _until, resume
from tests.serving.openai.test_server import free_port, serving
from tests.training.workshop import assert_same_steps, metrics
from upshot.config.load import validate_recipe
from upshot.config.recipe import Recipe, TinyConfig
from upshot.engine.engine import Engine
from upshot.models.connect import connect
from upshot.models.engine_model import EngineModel
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.rollout.play import play_step
from upshot.run.run import TrainingRun, train
from upshot.serving.openai.server import OpenAIServer
from upshot.tasks.ciphers import Ciphers

SHAPE = TinyConfig(hidden=16, layers=1, heads=1, mlp=32)


def peer(folder: Path, order: int) -> Path:
    """A classmate of random weights whose tokenizer numbers the words in a different order."""
    words = list(Ciphers().vocabulary())
    tokenizer = tiny_tokenizer(words[order:] + words[:order])
    tiny_model(SHAPE, tokenizer, order).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Two classmates in process, one behind HTTP."""
    root = tmp_path_factory.mktemp("peers")
    folders = [peer(root / name, order) for name, order in (("a", 0), ("b", 7), ("c", 19))]
    words = list(Ciphers().vocabulary())
    tokenizer = tiny_tokenizer(words[19:] + words[:19])
    model = EngineModel(Engine(tiny_model(SHAPE, tokenizer, 19), {tokenizer.eos_token_id}), tokenizer, "c")
    with serving(OpenAIServer(model)) as url:
        yield {"a": str(folders[0]), "b": str(folders[1]), "c": f"{url}/v1#c", "c_tokenizer": str(folders[2])}


def recipe(folder: Path, peers: dict[str, Any], **futures: Any) -> Recipe:
    """A tiny policy that has just learned to think before it answers, and its classmates."""
    named = [{"name": "a"}, {"name": "b", "weight": 2}, {"name": "c", "tokenizer": peers["c_tokenizer"]}]
    return validate_recipe(
        {
            "name": "classmates",
            "run_dir": str(folder),
            "model": {"tiny": {"hidden": 32, "layers": 1, "heads": 2, "mlp": 64}, "dtype": "float32"},
            "models": {name: peers[name] for name in "abc"},
            "task": {"name": "ciphers", "limit": 64, "coded": 0.0},
            "episode": {"max_tokens": 24},
            "futures": {"name": "classmates", "classmates": named, "samples": 4, "max_tokens": 3, **futures},
            "reward": {"metrics": [{"name": "verifier"}]},
            "warm_start": {"steps": 60, "batch": 32, "lr": 0.01},
            "train": {
                "method": "rl",
                "advantage": "dr-grpo",
                "steps": 3,
                "prompts_per_step": 2,
                "group_size": 3,
                "lr": 1e-3,
                "save": {"every": 1},
            },
        }
    )


def rollouts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_bytes().split(b"\n") if line]


def test_three_classmates_train_a_policy_and_killed_and_resumed_the_run_is_the_same(
    peers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe(tmp_path / "straight", peers))
    lines = metrics(tmp_path / "straight")
    last = lines[-1]
    assert last["classmate/a/missing"] == last["classmate/b/missing"] == last["classmate/c/missing"] == 0
    assert {"part/main", "part/classmate"} <= set(last)
    assert {"classmate/score", "classmate/agreement", "classmate/thought_length"} <= set(last)
    thoughtful = [line for line in rollouts(tmp_path / "straight") if any(f["cut"] for f in line["futures"])]
    assert thoughtful, "the warm start has taught it to think"
    for line in thoughtful:
        by = [future["by"] for future in line["futures"] if future["cut"]]
        assert sorted(by) == sorted("abc" * 4)
        means = {n: _mean([f["scores"]["classmate"]["value"] for f in line["futures"] if f["by"] == n]) for n in "abc"}
        expected = (means["a"] + 2 * means["b"] + means["c"]) / 4
        assert line["reward"]["parts"]["classmate"]["value"] == pytest.approx(expected)
        kept = [span for span in line["credit"] if span["parts"] == ["main", "classmate"]]
        (span,) = {tuple(f["span"]) for f in line["futures"] if f["cut"]}
        assert [(s["start"], s["stop"]) for s in kept] == [span]
        # The credited text shows every token; the note is the thought as text, without special ones.
        words = [word for word in kept[0]["text"].split() if not word.startswith("<|")]
        assert words == line["messages"][-1]["note"]["thought"].split()
    with monkeypatch.context() as killed:
        killed.setattr(TrainingRun, "checkpoint", _until(TrainingRun.checkpoint, "rl", 1))
        with pytest.raises(Interrupted):
            train(recipe(tmp_path / "resumed", peers), reporter=Stops("rl", 2))
    resume(tmp_path / "resumed")
    assert_same_steps(_without_tokens(metrics(tmp_path / "resumed")), _without_tokens(lines))
    assert rollouts(tmp_path / "resumed") == rollouts(tmp_path / "straight")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _without_tokens(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the engines' own counters, which count what a killed step played twice."""
    return [{k: v for k, v in line.items() if not k.startswith("model/")} for line in lines]


def test_an_earlier_copy_of_the_policy_can_be_its_classmate_also_after_a_resume(
    peers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(folder: Path) -> Recipe:
        own = recipe(folder, peers, classmates=["start", "late"], samples=1)
        return own.model_copy(
            update={"models": recipe_models({"start": "policy@start", "late": "policy@2"})}, deep=True
        )

    train(made(tmp_path / "straight"))
    with monkeypatch.context() as killed:
        killed.setattr(TrainingRun, "checkpoint", _until(TrainingRun.checkpoint, "rl", 2))
        with pytest.raises(Interrupted):
            train(made(tmp_path / "resumed"), reporter=Stops("rl", 3))
    resume(tmp_path / "resumed")
    assert rollouts(tmp_path / "resumed") == rollouts(tmp_path / "straight")


def recipe_models(given: dict[str, Any]) -> dict[str, Any]:
    from upshot.config.model_spec import ModelSpec

    return {name: ModelSpec.parse(spec) for name, spec in given.items()}


def test_with_adapters_a_frozen_copy_shares_every_weight_that_is_not_trained() -> None:
    peft = pytest.importorskip("peft")
    from upshot.models.rendering import Renderer
    from upshot.training.snapshots import PolicyModel

    tokenizer = tiny_tokenizer(Ciphers().vocabulary())
    module = peft.get_peft_model(tiny_model(SHAPE, tokenizer, 0), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    renderer = Renderer(tokenizer)
    policy = PolicyModel(Engine(module, renderer.end_ids), tokenizer, renderer, module)
    twin = policy.copy_at("start")
    assert twin is policy.copy_at("start")
    shared = {p.data_ptr() for p in module.parameters()}
    own = [name for name, p in twin.module.named_parameters() if p.data_ptr() not in shared]  # type: ignore[attr-defined]
    assert own and all("lora_" in name for name in own)


def test_a_restarted_classmate_server_costs_only_the_samples_in_between() -> None:
    """Two classmates; the one behind HTTP is down for one of three steps."""
    tokenizer = tiny_tokenizer(Ciphers().vocabulary())
    port = free_port()

    def server() -> OpenAIServer:
        return OpenAIServer(
            EngineModel(Engine(tiny_model(SHAPE, tokenizer, 1), {tokenizer.eos_token_id}), tokenizer, "c")
        )

    far = connect({"url": f"http://127.0.0.1:{port}/v1", "model": "c", "retries": 0, "backoff_s": 0.01})
    near = Recites("near", lambda text, seed: "1")

    async def three_steps() -> list[list[str | None]]:
        made, _ = context(thinks("hm"), {"near": near, "far": far}, samples=2)
        away: list[list[str | None]] = []
        for step in range(3):
            with serving(server(), port) if step != 1 else nullcontext():
                if step == 0:
                    await far.start()
                    await made.futures.start()
                reply = (await play_step(made, ROWS[1:2], 1, step))[0][0]
                assert reply.credit is not None and reply.credit.parts["classmate"].value is not None
                away.append([future.missing for future in reply.futures if future.by == "far"])
        await far.aclose()
        return away

    assert asyncio.run(three_steps()) == [[None] * 2, ["connection"] * 2, [None] * 2]
