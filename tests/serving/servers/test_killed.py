"""`kill -9` during a run: of one of its servers, and of the run itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.patience import wait_until
from tests.serving.servers.started import alive
from tests.tiny import tiny_parts
from upshot.config.load import load_recipe
from upshot.core.files import read_jsonl
from upshot.run.run import train
from upshot.serving.servers.state import folder_of, is_up, read_state, ready

Write = Callable[[str], Path]
RECIPE = """
extends: quickstart
serve: servers.yaml
models:
  user: {model: "serve:user", concurrency: 16}
futures: {samples: 1, rounds: 1, user: {name: llm}}
credit: reply
warm_start: null
reward: {max_missing: 1}
task: {rows_per_split: 16}
model: {tiny: {hidden: 16, layers: 1, heads: 2, mlp: 32}}
train: {steps: 2, prompts_per_step: 2, group_size: 4}
run_dir: run
"""
REPLICAS = "servers: {user: {model: x, engine: vllm, replicas: 3}}"


def recipe_file(folder: Path) -> Path:
    path = folder / "mine.yaml"
    path.write_text(RECIPE)
    return path


def servers_of(file: Path) -> dict[str, Any] | None:
    """The servers, while all run."""
    state = read_state(folder_of(file))
    return state["servers"] if state is not None and ready(state) else None


def kill(file: Path, name: str) -> dict[str, Any]:
    """Kill a server; returns all servers once they run again."""
    before = wait_until(lambda: servers_of(file))[name]
    os.kill(before["pid"], signal.SIGKILL)
    return wait_until(lambda: (now := servers_of(file)) and now[name]["pid"] != before["pid"] and now)  # type: ignore[no-any-return]


def missing(rollouts: Path) -> set[str]:
    """The reasons for which futures are missing."""
    return {future["missing"] for row in read_jsonl(rollouts) for future in row["futures"] if future["missing"]}


def test_a_run_loses_no_call_when_one_of_three_replicas_is_killed(serve_file: Write, tmp_path: Path) -> None:
    file, hold = serve_file(REPLICAS), tmp_path / "hold"
    hold.touch()
    back: list[dict[str, Any]] = []

    def kill_one() -> None:
        port = wait_until(lambda: servers_of(file))["user-2"]["url"].rpartition(":")[2].removesuffix("/v1")
        wait_until((tmp_path / f"asked.{port}").exists)  # calls are in flight there
        back.append(kill(file, "user-2"))
        hold.unlink()

    killer = threading.Thread(target=kill_one)
    killer.start()
    folder = train(load_recipe(str(recipe_file(tmp_path))).recipe)
    killer.join()
    steps = [line for line in read_jsonl(folder.path / "metrics.jsonl") if "step" in line]
    assert back[0]["user-2"]["restarts"] == 1 and back[0]["user-1"]["restarts"] == 0
    assert steps[-1]["step"] == 2 and missing(folder.path / "rollouts.jsonl") == set()
    assert sum(line.get("model/user/user/retries/connection", 0) for line in steps) > 0
    assert not is_up(folder_of(file))


REAL = "tests.serving.servers.plain_user:PlainUser"


Begin = Callable[[str, str, int], subprocess.Popen[str]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start `upshot train` with embedded servers of a tiny model."""
    module, tokenizer, _, _ = tiny_parts()
    module.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    recipe_file(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:

        def start(models: str, asks: str, steps: int) -> subprocess.Popen[str]:
            path = tmp_path / "real.yaml"
            path.write_text(
                f"extends: ./mine.yaml\nmodels: {models}\n"
                f"futures: {{rounds: 1, user: {{name: '{REAL}', asks: {asks}}}}}\n"
                f"train: {{steps: {steps}, prompts_per_step: 2, group_size: 2, save: {{every: {steps}}}}}\n"
            )
            words = [sys.executable, "-m", "upshot.cli", "train", str(path)]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            run = stack.enter_context(subprocess.Popen(words, env=environment, cwd=tmp_path, **pipes))
            stack.callback(run.kill)  # if a test fails
            return run

        yield start


def steps_done(tmp_path: Path) -> int:
    """The number of finished steps."""
    file = tmp_path / "run" / "metrics.jsonl"
    return max((line.get("step", 0) for line in read_jsonl(file)), default=0) if file.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_with_embedded_replicas_finishes(serve_file: Write, begin: Begin, tmp_path: Path) -> None:
    file = serve_file("servers: {user: {model: tiny, devices: cpu, replicas: 3}}")
    run = begin('{user: {model: "serve:user"}}', "[user]", 200)
    before = wait_until(lambda: steps_done(tmp_path) > 2 and servers_of(file), 300)
    after = kill(file, "user-2")
    assert steps_done(tmp_path) < 200 and after["user-2"]["url"] == before["user-2"]["url"]
    told = run.communicate()[0]
    assert run.returncode == 0, told
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert steps_done(tmp_path) == 200 and missing(tmp_path / "run" / "rollouts.jsonl") == set()
    assert lines[-1]["time/model/user/user/replicas_up"] == 3
    assert not any(alive(server["pid"]) for server in after.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_calls_that_are_not_retried_are_missing_with_the_reason(
    serve_file: Write, begin: Begin, tmp_path: Path
) -> None:
    one = "{model: tiny, devices: cpu}"
    file = serve_file(f"servers: {{a: {one}, b: {one}, c: {one}}}")
    models = '{a: {model: "serve:a", retries: 0}, b: "serve:b", c: "serve:c", user: policy}'
    run = begin(models, "[a, b, c]", 200)
    wait_until(lambda: steps_done(tmp_path) > 2, 300)
    kill(file, "a")
    back_at = steps_done(tmp_path)
    told = run.communicate()[0]
    assert run.returncode == 0, told
    rows = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    gaps = [(row["step"], future) for row in rows for future in row["futures"] if future["missing"]]
    assert gaps and {future["missing"] for _, future in gaps} == {"connection"}
    assert all(step <= back_at + 1 for step, _ in gaps) and back_at < steps_done(tmp_path) == 200
    assert all("connection" in score["detail"]["why"] for _, future in gaps for score in future["scores"].values())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_leaves_no_server(serve_file: Write, begin: Begin, tmp_path: Path) -> None:
    file = serve_file("servers: {user: {model: tiny, devices: cpu, replicas: 3}}")
    run = begin('{user: {model: "serve:user"}}', "[user]", 2000)
    servers = wait_until(lambda: steps_done(tmp_path) > 2 and servers_of(file), 300)
    state = read_state(folder_of(file))
    assert state is not None
    pids = [state["pid"], *(server["pid"] for server in servers.values())]
    assert all(map(alive, pids))
    run.kill()
    run.communicate()
    wait_until(lambda: not any(map(alive, pids)) and not is_up(folder_of(file)), 30)
