"""Helper models given as folders: one process per node, counted and shown before the start; servers of a serve file."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving.servers.conftest import serve_file
from tests.verl.test_checks import recipe_with, says
from upshot.config.load import load_recipe
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import TinyConfig
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.models.base import Completion, Model, Request
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.serving.servers.state import folder_of, is_up, lease, with_addresses
from upshot.tasks.slots import SlotsTask
from upshot.verl import launch as launching
from upshot.verl.checks.resources import Node, compare_needs, find_needs
from upshot.verl.config import compose
from upshot.verl.helpers import count_gpus
from upshot.verl.worker import RolloutWorker

__all__ = ["serve_file"]
Write = Callable[[str], Path]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder."""
    tokenizer = tiny_tokenizer(SlotsTask(rows_per_split=64).vocabulary())
    tiny_model(TinyConfig(hidden=16, layers=1, heads=2, mlp=32), tokenizer, 0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_dry_run_shows_where_a_helper_given_as_a_folder_is_loaded(folder: Path) -> None:
    page = compose(recipe_with(f"models.judge={folder}")).page()
    assert f"models.judge={folder}    loaded once per node, on its CPUs" in page
    there = compose(recipe_with(f"models.judge={{model: {folder}, device: cuda}}")).page()
    assert "loaded once per node, on an additional GPU of it" in there


def test_a_helpers_gpu_is_counted_beside_those_of_the_ranks(folder: Path) -> None:
    words = [f"models.{role}={{model: {folder}, device: cuda}}" for role in ("judge", "user")]
    recipe = recipe_with(*words)
    assert count_gpus(recipe) == 1, "two roles with the same spec share a process"
    plan = compose(recipe, None, ["trainer.n_gpus_per_node=2", "trainer.nnodes=2"])
    need = find_needs(plan.value, count_gpus(recipe))
    assert (need.gpus, need.cpus) == (6, 3 * 4 + 8 + 2)
    (told,) = says(compare_needs(need, [Node("a", 40, 2), Node("b", 40, 2)]))
    assert "6 GPUs (1 a node for helper models)" in told
    assert "no node of Ray has 3 GPUs and 6 CPUs" in says(compare_needs(need, [Node("a", 40, 5), Node("b", 40, 2)]))[0]
    assert not says(compare_needs(need, [Node("a", 40, 3), Node("b", 40, 3)]))


def test_a_gpu_by_number_is_refused_with_an_alternative(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"models\.judge\.device=cuda:1: Ray assigns the GPUs.* models\.judge\.device=cuda"
    ):
        compose(recipe_with(f"models.judge={{model: {folder}, device: 'cuda:1'}}")).check()


class Lent(Model):
    """A model that another process owns."""

    name = "lent"

    async def generate(self, request: Request) -> list[Completion]:
        return [Completion("hello", "stop")]


def test_a_worker_asks_the_lent_model_and_loads_none(folder: Path) -> None:
    async def lend(spec: ModelSpec) -> Model:
        assert spec.model == str(folder)
        return Lent()

    async def ask() -> str:
        recipe = recipe_with(f"models.judge={folder}", "task.rows_per_split=64", "warm_start=null")
        words = tiny_tokenizer(SlotsTask(rows_per_split=64).vocabulary())
        worker = RolloutWorker(recipe, words, 256, borrow=lend)
        await worker.start()
        [said] = await worker.services.models["judge"].generate(Request([Message("user", "hi")]))
        assert worker.services.stats()["model/judge/judge/calls"] == 1, "what it asks is counted where it is asked"
        await worker.aclose()
        return said.text

    assert asyncio.run(ask()) == "hello"


def test_a_run_on_verl_starts_its_servers_and_gives_workers_their_addresses(
    serve_file: Write, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = serve_file("servers: {a: {model: org/a, engine: vllm}}")
    own = ["credit.by=reply", "warm_start=null", f"model.path={folder}", f"run_dir={tmp_path / 'run'}"]
    own += ["task.rows_per_split=64", f"serve={file}", "models.judge=serve:a"]
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launching, "find", lambda recipe, plan, **more: [])
    code = (
        "import os, yaml, urllib.request\n"
        "url = yaml.safe_load(open(os.environ['UPSHOT_CLUSTER_RECIPE']))['models']['judge']['url']\n"
        "print(urllib.request.urlopen(url + '/models').read().decode())\n"
    )
    monkeypatch.setattr(launching, "command", lambda plan: [sys.executable, "-c", code])
    said: list[str] = []
    path = launching.launch(load_recipe("quickstart", own).recipe, [], said.append)
    assert any('"a"' in line for line in said), said
    assert not is_up(folder_of(file))
    assert load_recipe(str(path / "recipe.yaml")).recipe.models["judge"].model == "serve:a", "the run's own stays"


def test_remote_workers_get_the_machines_name_if_servers_listen_beyond_loopback(
    serve_file: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPSHOT_API_KEY", "secret")
    file = serve_file("host: 0.0.0.0\nservers: {a: {model: org/a, engine: vllm}}")
    models = {"judge": ModelSpec(model="serve:a")}
    with lease(str(file), lambda text: None):
        here, there = (with_addresses(str(file), models, far)["judge"] for far in (False, True))
    assert str(here.url).startswith("http://127.0.0.1:")
    assert str(there.url).startswith(f"http://{os.uname().nodename}:") and there.api_key_env == "UPSHOT_API_KEY"
