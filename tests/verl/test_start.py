"""The model that verl begins with is prepared once, before the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from upshot.config.load import load_recipe
from upshot.config.phases import WARM_START
from upshot.config.recipe import Recipe
from upshot.models.local import local_path
from upshot.verl.checks.node import NodeRequirements, check_node
from upshot.verl.prepare import make_start, needs_start, start_recipe

TINY = (
    "model.tiny={hidden: 16, layers: 1, heads: 2, mlp: 32}",
    "task.rows_per_split=16",
    "warm_start={steps: 2, batch: 2}",
)


def recipe(*overrides: str) -> Recipe:
    return load_recipe("quickstart", ["credit.by=reply", *TINY, *overrides]).recipe


def test_a_warm_start_is_made_once_and_again_for_another_recipe(tmp_path: Path) -> None:
    said: list[str] = []
    first = make_start(recipe(), tmp_path, said.append)
    weights = Path(first.model.path) / "model.safetensors"
    assert first.warm_start is None and not needs_start(first) and Path(first.model.path).is_absolute()
    made = weights.stat().st_mtime_ns
    assert make_start(recipe(), tmp_path, said.append) == first
    assert weights.stat().st_mtime_ns == made and len(said) == 1
    make_start(recipe("seed=1"), tmp_path, said.append)
    assert weights.stat().st_mtime_ns != made and len(said) == 2


def test_the_warm_start_is_local_modes_own(tmp_path: Path) -> None:
    own = start_recipe(recipe("train.epochs=3", "eval.every=5"), tmp_path)
    assert own.run_dir == str(tmp_path / WARM_START)
    assert (own.train.steps, own.train.epochs, own.eval.every) == (0, None, 0)
    assert own.warm_start == recipe().warm_start and own.seed == recipe().seed


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ((), True),
        (("warm_start=null",), True),  # a new tiny model
        (("model.path=/m",), True),
        (("model.path=/m", "warm_start.new_model_only=true"), False),
        (("model.path=/m", "warm_start=null"), False),
    ],
)
def test_a_model_is_created_if_none_is_named_or_a_warm_start_is_asked_for(
    overrides: tuple[str, ...], needed: bool
) -> None:
    assert needs_start(recipe(*overrides)) is needed


def test_an_adapter_is_merged_once_into_the_model_that_verl_begins_with(tmp_path: Path) -> None:
    """As in the paper's chain: ppo starts from the run folder of an SFT with LoRA."""
    said: list[str] = []
    base = make_start(recipe(), tmp_path / "base", said.append).model.path
    start = make_start(recipe(f"model.path={base}", "model.lora={r: 2}"), tmp_path / "first", said.append)
    assert (Path(start.model.path) / "config.json").is_file(), "a warm start with LoRA is an adapter as well"
    run = tmp_path / "first" / WARM_START
    next_one = recipe(f"model.path={run}", "warm_start=null", "model.lora={r: 2}")
    merged = make_start(next_one, tmp_path / "second", said.append)
    weights = Path(merged.model.path) / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert make_start(next_one, tmp_path / "second", said.append) == merged
    assert weights.stat().st_mtime_ns == made and sum("merging the adapter" in line for line in said) == 2
    problems = check_node(NodeRequirements(local_path(str(run)), ""))
    assert not [problem for problem in problems if "model folder" in problem]


def test_adapters_of_a_new_model_are_merged_into_it_as_well(tmp_path: Path) -> None:
    start = make_start(recipe("model.lora={r: 2}"), tmp_path, lambda line: None)
    assert (Path(start.model.path) / "model.safetensors").is_file() and (tmp_path / WARM_START / "base").is_dir()
