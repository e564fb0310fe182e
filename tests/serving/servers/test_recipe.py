"""A recipe names a serve file: its servers run while runs use them, and no longer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import wait_until
from tests.serving.servers.started import Started, alive
from upshot.config.load import load_recipe
from upshot.config.model_spec import ModelSpec
from upshot.core.errors import UserError
from upshot.rollout.check_names import check_names
from upshot.run import checks
from upshot.run.run import train
from upshot.serving.servers.state import folder_of, is_up, lease, read_state, with_addresses

Write = Callable[[str], Path]
ONE = "servers: {a: {model: org/a, engine: vllm}}"
TINY = (
    *("model.tiny={hidden: 16, layers: 1, heads: 2, mlp: 32}", "task.rows_per_split=16", "train.steps=1"),
    *("train.prompts_per_step=2", "train.group_size=2", "warm_start=null", "reward.max_missing=1", "run_dir=run"),
)


def recipe_file(folder: Path, model: str = "serve:a") -> str:
    path = folder / "mine.yaml"
    path.write_text(
        f"extends: quickstart\nserve: servers.yaml\nmodels: {{spare: {{model: '{model}', timeout_s: 9}}}}\n"
    )
    return str(path)


def test_a_run_starts_and_stops_its_servers(serve_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSHOT_API_KEY", "secret")
    file = serve_file(ONE)
    recipe = load_recipe(recipe_file(tmp_path), TINY).recipe
    assert recipe.serve == str(file)
    folder = train(recipe)
    assert (tmp_path / "a").read_text() == "1" and not is_up(folder_of(file))
    assert not alive(int((tmp_path / "a.child").read_text()))
    assert folder.recipe.models["spare"].model == "serve:a"


def test_a_dry_run_starts_no_server_and_finds_nothing_wrong_with_that(serve_file: Write, tmp_path: Path) -> None:
    file = serve_file(ONE)
    findings = checks.find(load_recipe(recipe_file(tmp_path), TINY).recipe, offline=True)
    assert [finding.says for finding in findings if finding.fatal] == []
    assert not (tmp_path / "a").exists() and not is_up(folder_of(file))


def test_running_servers_are_shared_and_left_running(serve_file: Write) -> None:
    file = serve_file(ONE)
    started = Started(file)
    url = started.ready()["servers"]["a"]["url"]
    with lease(str(file), lambda _: None), lease(str(file), lambda _: None):
        spec = with_addresses(str(file), {"x": ModelSpec.parse({"model": "serve:a", "timeout_s": 9})})["x"]
    assert (spec.url, spec.model, spec.timeout_s, spec.kind) == (url, "a", 9.0, "endpoint")
    assert started.ready()["pid"] == started.process.pid
    file.write_text(ONE.replace("org/a", "org/b"))
    with pytest.raises(UserError, match="has changed since its servers came up"), lease(str(file), lambda _: None):
        pass
    started.end()


def test_servers_that_a_run_started_stay_for_another_and_end_when_that_is_killed(serve_file: Write) -> None:
    file = serve_file(ONE)
    use = f"with lease({str(file)!r}, print): print('up', flush=True); input()"
    hold = f"from upshot.serving.servers.state import lease\n{use}"
    with lease(str(file), lambda _: None):
        state = read_state(folder_of(file))
        other = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert state is not None and other.stdout is not None
        while other.stdout.readline() != "up\n":
            assert other.poll() is None
    assert is_up(folder_of(file)) and alive(state["servers"]["a"]["pid"])
    other.kill()
    other.communicate()
    wait_until(lambda: not is_up(folder_of(file)), 20)
    assert not alive(state["servers"]["a"]["pid"])


def test_servers_that_do_not_start_end_the_run_with_their_output(serve_file: Write) -> None:
    file = serve_file(ONE.replace("engine", "environment: {FAKE_FAILS: 9}, engine"))
    with pytest.raises(UserError, match=r"did not start: .*CUDA is on holiday"), lease(str(file), lambda _: None):
        pass


def test_an_unknown_server_is_refused_before_any_work(serve_file: Write, tmp_path: Path) -> None:
    serve_file(ONE)
    with pytest.raises(UserError, match=r"models.spare: .* names no server 'b'; known: a"):
        check_names(load_recipe(recipe_file(tmp_path, "serve:b")).recipe)
    with pytest.raises(UserError, match=r"models.x is 'serve:a', but the recipe names no serve file"):
        check_names(load_recipe("quickstart", ["models.x=serve:a"]).recipe)
    with pytest.raises(UserError, match="cannot read serve file"):
        check_names(load_recipe("quickstart", ["serve=nowhere.yaml"]).recipe)
