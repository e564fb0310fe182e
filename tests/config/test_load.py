"""Recipes: overrides, origins, and one clear line for every mistake."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from upshot.config.layers import COMMAND_LINE, DEFAULT, flatten
from upshot.config.load import RECIPES, describe_recipe, dump_recipe, find_recipe, list_recipes, load_recipe
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.rollout.check_names import check_names


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_overrides_win_and_every_value_knows_its_origin() -> None:
    loaded = load_recipe("quickstart", ["train.lr=1e-5", "futures.samples=3"])
    assert loaded.recipe.train.lr == 1e-5
    assert loaded.recipe.futures.samples == 3
    assert loaded.origin("train.lr") == COMMAND_LINE
    assert loaded.origin("futures.rounds") == "quickstart.yaml"
    assert loaded.origin("train.optimizer.grad_clip") == DEFAULT


def test_list_items_are_overridden_by_position_or_name() -> None:
    overrides = ["reward.metrics.0.weight=2", "reward.metrics.token_amount.weight=-0.5"]
    metrics = load_recipe("quickstart", overrides).recipe.reward.metrics
    assert [metric.weight for metric in metrics] == [2.0, -0.5]


def test_a_resolved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", ["seed=7"]).recipe
    assert load_recipe(write(tmp_path, dump_recipe(recipe))).recipe == recipe


def test_a_recipe_extends_another_and_says_where_values_came_from(tmp_path: Path) -> None:
    write(tmp_path, "task: {name: slots, vague: 0.5}\ntrain: {steps: 3, lr: 1e-4}", "base.yaml")
    loaded = load_recipe(write(tmp_path, "extends: base.yaml\ntrain: {steps: 5}"))
    assert (loaded.recipe.train.steps, loaded.recipe.train.lr) == (5, 1e-4)
    assert (loaded.origin("train.steps"), loaded.origin("train.lr")) == ("mine.yaml", "base.yaml")
    assert loaded.recipe.task.options == {"vague": 0.5}


def test_options_of_another_task_are_not_inherited(tmp_path: Path) -> None:
    write(tmp_path, "task: {name: slots, vague: 0.5}", "base.yaml")
    assert load_recipe(write(tmp_path, "extends: base.yaml\ntask: {name: gsm8k}")).recipe.task.options == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trian.lr=1", r"unknown key 'trian'; did you mean 'train'\?"),
        ("train.stepz=1", r"unknown key 'stepz' in train; did you mean 'steps'\?"),
        ("train.lr=fast", r"train.lr = 'fast': input should be a valid number"),
        ("train.lr=-1", r"train.lr = -1: input should be greater than 0"),
        ("reward.overlong.rule=ignore", r"reward.overlong.rule = 'ignore': input should be 'score'"),
        ("train.lr", r"should read key=value"),
        ("reward.metrics.acuracy.weight=1", r"'reward.metrics' has no item 'acuracy'"),
        ("train.lr=1e400", r"train.lr = inf: input should be a finite number"),
        ("train.dpo.min_gap=.nan", r"train.dpo.min_gap = nan: input should be"),
        ("train={steps: 1, steps: 2}", r"override 'train'.*is not valid YAML"),
    ],
)
def test_a_mistake_is_named_with_its_value_and_the_way_out(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe("quickstart", [override])


def test_a_group_of_one_is_for_methods_that_compare_no_replies() -> None:
    assert load_recipe("quickstart", ["train.group_size=1", "train.method=ppo"]).recipe.train.group_size == 1


def test_a_typo_is_attributed_to_the_file_or_override_it_is_in(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^command line: unknown key 'trian'; did you mean 'train'\?"):
        load_recipe("quickstart", ["trian.steps=1"])  # a whole section that only the command line has
    with pytest.raises(UserError, match=r"^command line: unknown key 'stepz' in train; did you mean 'steps'\?"):
        load_recipe("quickstart", ["train.stepz=7"])
    with pytest.raises(UserError, match=r"^command line: 'reward.metrics' has no item 'acuracy'"):
        load_recipe("quickstart", ["reward.metrics.acuracy.weight=1"])
    mine = write(tmp_path, "extends: quickstart\ntrain: {stepz: 7}\n")
    with pytest.raises(UserError, match=rf"^{mine}: unknown key 'stepz'"):
        load_recipe(mine, ["train.lr=1e-4"])


def test_a_duplicate_key_is_refused(tmp_path: Path) -> None:
    twice = write(tmp_path, "task: slots\ntrain:\n  lr: 1e-4\n  steps: 3\n  lr: 1e-5\n")
    with pytest.raises(UserError, match=r"mine.yaml is not valid YAML: the key 'lr' appears twice .*line 5"):
        load_recipe(twice)


def test_files_that_are_empty_or_not_utf8_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is empty; `upshot new recipe NAME` writes one"):
        load_recipe(write(tmp_path, "# nothing yet\n"))
    (tmp_path / "latin.yaml").write_bytes("name: Grün\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.yaml' is not UTF-8 \(byte 8\); save it as UTF-8"):
        load_recipe(str(tmp_path / "latin.yaml"))


def test_unknown_and_unreadable_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown recipe 'quickstrat'; did you mean 'quickstart'"):
        load_recipe("quickstrat")
    with pytest.raises(UserError, match="no such file"):
        load_recipe(str(tmp_path / "absent.yaml"))
    with pytest.raises(UserError, match="not valid YAML"):
        load_recipe(write(tmp_path, "a: [1"))
    with pytest.raises(UserError, match="mapping of sections"):
        load_recipe(write(tmp_path, "- 1"))
    with pytest.raises(UserError, match="is circular"):
        load_recipe(write(tmp_path, "extends: mine.yaml"))


@pytest.mark.parametrize("name", list_recipes())
def test_every_shipped_recipe_is_valid_and_describes_itself(name: str) -> None:
    recipe = load_recipe(name).recipe
    check_names(recipe)
    assert recipe.task.name and recipe.name == name
    assert describe_recipe(find_recipe(name))


CLASSMATES = ["gsm8k", "math", "code", "dolci", "sycophancy", "mmlu-hint"]


@pytest.mark.parametrize("name", [f"classmate-{source}" for source in CLASSMATES])
def test_classmate_recipes_hold_the_published_settings_and_have_a_baseline_twin(name: str) -> None:
    recipe = load_recipe(name).recipe
    train = recipe.train
    assert (train.advantage.name, train.length_norm, train.kl.weight) == ("dr-grpo", "constant", 0.0)
    assert (train.group_size, train.lr, recipe.episode.max_tokens, recipe.model.max_context) == (8, 1e-5, 3072, 4096)
    assert recipe.futures.name == "classmates" and recipe.episode.think == ("<think>", "</think>")
    twin = load_recipe(name, ["futures=none"]).recipe
    check_names(twin)
    assert twin.futures.name == "none" and twin.futures.options == {}
    changed = {"futures": recipe.futures}
    assert twin.model_copy(update=changed) == recipe
    header = find_recipe(name).read_text()
    assert f"upshot train {name} " in header and f"upshot train {name} futures=none" in header


def test_the_schema_for_editors_is_current() -> None:
    shipped = json.loads((RECIPES / "schema.json").read_text())
    assert shipped == Recipe.model_json_schema(), "run: python docs/draw_reference.py"


def test_the_reference_page_is_current_and_has_every_key() -> None:
    made = runpy.run_path(str(RECIPES.parent / "docs" / "draw_reference.py"))["page"]()
    assert (RECIPES.parent / "docs" / "reference.md").read_text() == made, "run: python docs/draw_reference.py"
    for key, _ in flatten(Recipe.model_json_schema()["$defs"]["TrainConfig"]["properties"]):
        assert f"`train.{key.partition('.')[0]}`" in made
    for key in ("eval.every", "reward.max_missing", "warm_start.new_model_only", "models.NAME.timeout_s"):
        assert f"`{key}`" in made


def test_every_recipe_field_has_a_docstring() -> None:
    def bare(schema: dict[str, Any], where: str) -> list[str]:
        whole: dict[str, Any] = next((part for part in schema.get("anyOf", []) if "properties" in part), schema)
        fields: dict[str, dict[str, object]] = whole.get("properties", {})
        return [
            f"{where}.{name}" for name, field in fields.items() if "description" not in field and "$ref" not in field
        ]

    schema = Recipe.model_json_schema()
    undocumented = bare(schema, "recipe") + [x for name, part in schema["$defs"].items() for x in bare(part, name)]
    assert undocumented == []


def test_a_metric_is_added_without_repeating_the_list() -> None:
    before = [metric.name for metric in load_recipe("collabllm-grpo").recipe.reward.metrics]
    more = ["reward.metrics.+=bleu", "reward.metrics.+={name: rm_score, model: rm, weight: 0.5}"]
    added = load_recipe("collabllm-grpo", more)
    metrics = added.recipe.reward.metrics
    assert [metric.name for metric in metrics] == [*before, "bleu", "rm_score"]
    assert metrics[-1].weight == 0.5 and metrics[-1].options == {"model": "rm"}
    assert added.origin("reward.metrics.3") == COMMAND_LINE
    assert added.origin("reward.metrics.0.name") == "math-hard.yaml"


def test_a_metric_is_added_to_the_default_ones(tmp_path: Path) -> None:
    bare = write(tmp_path, "task: arithmetic\n")
    recipe = load_recipe(bare, ["reward.metrics.+=token_amount", "trackers.+=wandb"]).recipe
    assert [metric.name for metric in recipe.reward.metrics] == ["verifier", "token_amount"]
    assert recipe.trackers == ["wandb"]


@pytest.mark.parametrize("override", ["train.lr.+=1", "train.+=1", "nothing.+=1"])
def test_only_lists_can_be_added_to(override: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train|nothing"):
        load_recipe(write(tmp_path, "task: arithmetic\n"), [override])


def test_the_settings_of_the_verl_recipe_are_listed_beside_the_papers() -> None:
    grpo, sft = (load_recipe(f"collabllm-verl-{name}").recipe for name in ("grpo", "sft"))
    assert grpo.model.lora is None and sft.model.lora is None and grpo.model.path == "Qwen/Qwen2.5-7B-Instruct"
    train = grpo.train
    assert (train.epochs, train.prompts_per_step, train.group_size, train.lr, train.kl.weight) == (
        20,
        16,
        8,
        1e-6,
        0.001,
    )
    assert (grpo.eval.every, train.save.every, train.minibatches) == (10, 100, 2)
    assert (grpo.futures.rounds, grpo.futures.samples, grpo.episode.max_tokens) == (2, 3, 2048)
    weights = {metric.name: metric.weight for metric in grpo.reward.metrics}
    assert weights == {"accuracy": 1.0, "interactivity": 1.0, "token_amount": -0.0001}
    assert (sft.train.method, sft.train.lr, sft.train.epochs, sft.train.prompts_per_step) == ("sft", 1e-6, 3, 64)


def test_a_short_form_leaves_everything_else_at_its_default() -> None:
    loaded = load_recipe("quickstart", ["models.judge=http://127.0.0.1:1/v1#x", "reward.metrics.verifier.weight=2"])
    assert loaded.origin("models.judge.url") == loaded.origin("models.judge.model") == COMMAND_LINE
    assert loaded.origin("models.judge.retries") == DEFAULT
    assert loaded.origin("reward.metrics.0.weight") == COMMAND_LINE, "an item may be named by its name"
    assert loaded.origin("reward.metrics.0.name") == "quickstart.yaml"


def test_a_replaced_value_of_the_extended_file_leaves_no_origin(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "task: {name: slots, vague: 0.5}\nreward: {metrics: [{name: a, clamp: [0, 1]}]}\n"
    )
    (tmp_path / "own.yaml").write_text("extends: base.yaml\nreward: {metrics: [{name: b}]}\ntask: {name: ciphers}\n")
    loaded = load_recipe(str(tmp_path / "own.yaml"))
    assert loaded.origin("reward.metrics.0.clamp") == DEFAULT
    assert "task.vague" not in loaded.origins and loaded.origin("task.name") == "own.yaml"


def test_a_recipe_that_is_piped_is_not_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    from upshot.cli import main

    assert main(["recipe", "show", "collabllm-grpo"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out and "'data/math-hard/rl_train.parquet'" in out


def test_an_overridden_length_replaces_the_files_length_in_another_unit() -> None:
    def length(*overrides: str) -> tuple[int, float | None]:
        train = load_recipe("dpo", overrides).recipe.train
        return train.steps, train.epochs

    assert length() == (0, 1), "as the file says"
    assert length("train.steps=2") == (2, None)
    assert length("train.steps=2", "train.epochs=3") == (2, 3), "both were asked for: the shorter one"
    quickstart = load_recipe("quickstart", {"train.epochs": 2}).recipe.train
    assert (quickstart.steps, quickstart.epochs) == (0, 2)


def test_metrics_may_be_a_mapping_in_files_calls_and_overrides(tmp_path: Path) -> None:
    def metrics(*overrides: str, **call: Any) -> dict[str, float]:
        found = load_recipe(str(path), overrides or call).recipe.reward.metrics
        return {metric.name: metric.weight for metric in found}

    path = tmp_path / "mine.yaml"
    path.write_text("extends: quickstart\nreward: {metrics: {verifier: 2, token_amount: {weight: -1}}}\n")
    assert metrics() == {"verifier": 2, "token_amount": -1}
    assert metrics("reward.metrics.verifier.weight=3") == {"verifier": 3, "token_amount": -1}
    assert metrics("reward.metrics={verifier: 4}") == {"verifier": 4}
    assert metrics(reward={"metrics": {"verifier": 5}}) == {"verifier": 5}
    with pytest.raises(UserError, match="weight"):
        metrics("reward.metrics={verifier: much}")
