"""What is checked before verl starts: each problem is reported with its value and the way out."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe
from upshot.verl import checks
from upshot.verl.checks import endpoints_of, find, plugins_of
from upshot.verl.checks.node import TOKENIZERS, NodeRequirements, check_node, write_mark
from upshot.verl.checks.resources import Need, Node, before_ray, compare_needs, find_needs, ports_of
from upshot.verl.config import compose
from upshot.verl.plan import VerlPlan


def planned(*theirs: str) -> VerlPlan:
    return compose(recipe_with(), None, theirs)


def recipe_with(*overrides: str) -> Recipe:
    return load_recipe("quickstart", ["credit.by=reply", "warm_start=null", "model.path=/model", *overrides]).recipe


def says(found: Any) -> list[str]:
    return [finding.says for finding in found]


def test_a_rank_needs_three_cpus_and_each_storage_unit_and_the_controller_one() -> None:
    need = find_needs(planned("trainer.n_gpus_per_node=2", "trainer.nnodes=3").value)
    assert (need.gpus, need.cpus) == (6, 3 * 6 + 8 + 2)
    own = "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"
    assert find_needs(planned("trainer.n_gpus_per_node=1", own).value).cpus == 6


def test_reward_models_with_gpus_of_their_own_are_counted() -> None:
    judge = ["verl.reward.reward_model.enable_resource_pool=true", "verl.reward.reward_model.nnodes=1"]
    judge += ["verl.reward.reward_model.n_gpus_per_node=2", "trainer.n_gpus_per_node=8"]
    assert find_needs(planned(*judge).value).groups == (8, 2)


def test_too_few_cpus_are_reported_with_the_sum_and_what_to_do() -> None:
    (told,) = says(compare_needs(Need((2,), 8), [Node("a", 15, 2)]))
    assert "needs 16 CPUs (3 for each of 2 ranks, 8 storage units, 1 controller" in told
    assert "has 15 free" in told and "num_cpus=16" in told
    assert not says(compare_needs(Need((2,), 8), [Node("a", 16, 2)]))


def test_too_few_gpus_and_a_group_that_fits_on_no_node_are_reported() -> None:
    assert (
        "needs 8 GPUs in Ray, which has 4 free on 1 node(s)"
        in says(compare_needs(Need((8,), 1), [Node("a", 99, 4)]))[0]
    )
    two = [Node("a", 40, 4), Node("b", 40, 4)]
    (told,) = says(compare_needs(Need((8,), 1), two))
    assert "no node of Ray has 8 GPUs and 24 CPUs free at once" in told and "a, has 4 GPUs" in told
    assert not says(compare_needs(Need((4, 4), 8), two))
    assert not says(compare_needs(Need((4, 4), 8), [Node("a", 40, 4), Node("a", 40, 4)])), "two raylets of one host"
    assert "12 CPUs" in says(compare_needs(Need((4, 4), 8), [Node("a", 15, 4), Node("b", 60, 4)]))[0]


def test_before_ray_is_running_only_what_will_be_started_here_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    few = planned("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=4")
    assert "set ray_kwargs.ray_init.num_cpus=16" in says(before_ray(few.value))[0]
    assert "needs a Ray that spans them" in says(before_ray(planned("trainer.nnodes=2").value))[0]
    assert says(before_ray(planned("trainer.nnodes=2", "+ray_kwargs.ray_init.address=local").value))
    assert not says(before_ray(planned("trainer.nnodes=2", "+ray_kwargs.ray_init.address=auto").value))
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert not says(before_ray(few.value))


def test_a_node_without_an_endpoints_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = "models.judge={url: 'http://node7:1/v1', model: m, api_key_env: JUDGE_KEY}"
    recipe = recipe_with("model.path=Qwen/Qwen3-4B", judge)
    keys = checks.requirements_of(recipe, planned().value, "").keys
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    (said,) = check_node(NodeRequirements("", "", keys=keys))
    assert "JUDGE_KEY is not set" in said and "`ray start`" in said
    monkeypatch.setenv("JUDGE_KEY", "x")
    assert check_node(NodeRequirements("", "", keys=keys)) == []


def test_a_node_without_model_tokenizer_storage_or_code_says_so(tmp_path: Path) -> None:
    model = tmp_path / "model"
    said = check_node(NodeRequirements(str(model), str(tmp_path / "run"), files=(("code", str(tmp_path / "own")),)))
    assert any(f"model folder {model} is not there" in line for line in said)
    assert any("run folder" in line and "run_dir" in line for line in said)
    assert any("(`code`) is not there" in line for line in said)
    model.mkdir()
    assert [line for line in check_node(NodeRequirements(str(model), "")) if "model" in line] == [
        f"the model folder {model} has no config.json",
        f"the model folder {model} has no tokenizer ({', '.join(TOKENIZERS)})",
    ]


def test_a_run_folder_on_another_machine_is_distinguished_from_the_drivers(tmp_path: Path) -> None:
    mark = write_mark(tmp_path)
    assert check_node(NodeRequirements("", str(tmp_path), mark=mark)) == []
    (other := tmp_path / "other").mkdir()
    assert "not the same folder as the driver's" in check_node(NodeRequirements("", str(other), mark=mark))[0]
    assert not list(other.iterdir())


def test_an_unreachable_endpoint_and_a_taken_port_are_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        (told,) = check_node(
            NodeRequirements("", "", endpoints=(f"http://127.0.0.1:{port}/v1",))
        )  # bound, but nobody listens
        assert f"http://127.0.0.1:{port}/v1 cannot be reached" in told and "firewall" in told
        taken.listen()
        assert check_node(NodeRequirements("", "", endpoints=(f"http://127.0.0.1:{port}/v1",))) == []
        assert f"port {port} is taken" in check_node(NodeRequirements("", "", ports=(port,)))[0]


def test_the_ports_are_those_that_a_ray_started_here_is_told_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    own = "+ray_kwargs.ray_init.dashboard_port=8300"
    assert ports_of(planned(own).value) == [8300] and ports_of(planned().value) == []
    assert ports_of(planned(own, "+ray_kwargs.ray_init.include_dashboard=false").value) == []
    assert ports_of(planned(own, "+ray_kwargs.ray_init.address=auto").value) == []


def test_a_plug_in_whose_import_fails_shows_the_error(tmp_path: Path) -> None:
    (tmp_path / "broken_plug.py").write_text("raise RuntimeError('needs a driver')\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    (told,) = check_node(NodeRequirements("", "", plugins=("json", "broken_plug"), environment=environment))
    assert "'broken_plug' cannot be imported: RuntimeError: needs a driver" in told


def test_too_little_shared_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("upshot.verl.checks.node.shutil.disk_usage", lambda _: usage(2**26, 0, 2**26))
    assert "/dev/shm has 0.06 GB left" in check_node(NodeRequirements("", ""))[0]


def test_the_plug_ins_are_those_of_the_environment_and_of_the_config() -> None:
    assert plugins_of(planned().value, "one, two") == ["one", "two", "upshot.verl.adapters.register"]


def test_the_endpoints_are_those_of_models_replicas_and_servers() -> None:
    recipe = recipe_with(
        "models={judge: 'http://a:1/v1#m', user: {url: ['http://b:1/v1', 'http://c:1/v1'], model: m}}",
        "sandbox=http://d:1",
    )
    assert endpoints_of(recipe) == ["http://a:1/v1", "http://b:1/v1", "http://c:1/v1", "http://d:1"]


def test_one_check_reports_everything_including_local_modes_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "file").write_text("")
    recipe = recipe_with(f"run_dir={tmp_path / 'file' / 'run'}", f"model.path={tmp_path / 'no-model'}")
    plan = compose(recipe, None, ["trainer.n_gpus_per_node=1", "ray_kwargs.ray_init.num_cpus=2"])
    said = " / ".join(says(find(recipe, plan, offline=True)))
    assert "is no folder" in said and "no-model" in said and "num_cpus=13" in said and "pip install" in said


def test_a_trl_without_the_value_head_that_verl_imports_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("verl", "trl"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (said,) = check_node(NodeRequirements("", ""))
    assert "AutoModelForCausalLMWithValueHead" in said and "pip uninstall trl" in said
    (tmp_path / "trl" / "experimental" / "ppo").mkdir(parents=True)
    assert check_node(NodeRequirements("", "")) == []
