"""`upshot reproduce`: stages run once, a broken chain continues, and the table is shown beside the published one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from upshot.cli import main
from upshot.config.load import load_recipe
from upshot.core.errors import UserError
from upshot.offline.costs import cost_of
from upshot.offline.reproduce import Paper, PaperStage, list_papers, run_stage
from upshot.run.folder import RunFolder

PUBLISHED = {
    "collabllm/table-1": {
        "sft": {"train.lr": 1e-5, "train.epochs": 3, "train.prompts_per_step": 64, "model.lora.r": 32}
        | {"train.schedule.name": "cosine", "train.schedule.warmup_steps": 0},
        "dpo": {"train.lr": 5e-6, "train.epochs": 8, "train.prompts_per_step": 64, "train.dpo.beta": 0.1}
        | {"train.dpo.min_gap": 0.02, "train.schedule.name": "cosine", "train.schedule.warmup_steps": 0},
        "online_dpo": {"train.lr": 5e-6, "train.epochs": 1, "train.prompts_per_step": 32, "train.group_size": 2}
        | {"train.dpo.min_gap": 0, "train.schedule.name": "cosine"},
        "ppo": {"train.lr": 2e-6, "train.epochs": 5, "train.prompts_per_step": 64, "futures.samples": 3}
        | {"train.schedule.name": "constant", "train.kl.weight": 0.2, "train.ppo.value_weight": 0.1},
    },
    "classmates/gsm8k": {
        "classmates": {"train.lr": 3e-7, "train.prompts_per_step": 512, "train.kl.weight": 0.1, "futures.samples": 1}
        | {"train.advantage.name": "grpo", "train.length_norm": "token"}
    },
    "classmates/math": {"classmates": {"train.lr": 2e-7, "train.kl.weight": 0.1, "episode.max_tokens": 1024}},
    "classmates/sycophancy": {
        "classmates": {"train.lr": 1e-5, "train.kl.weight": 0, "train.steps": 1500, "episode.max_tokens": 3072}
        | {"train.advantage.name": "dr-grpo", "train.length_norm": "constant"}
    },
    "classmates/mmlu-hint": {
        "classmates": {"train.lr": 1e-6, "train.prompts_per_step": 64, "train.minibatches": 4, "train.group_size": 8}
        | {"train.advantage.name": "gdpo", "train.length_norm": "token", "eval.monitor": "monitor"}
    },
    "gsm8k-multiturn": {
        "trained": {"train.prompts_per_step": 8, "train.group_size": 2, "episode.temperature": 0.8}
        | {"episode.max_turns": 3, "episode.max_tokens": 192, "train.kl.weight": 1e-4}
    },
}
"""The published numbers, typed in a second time by hand; the files are compared with them."""
MODELS = {"collabllm": "meta-llama/Llama-3.1-8B-Instruct", "gsm8k-multiturn": "Qwen/Qwen2-7B-Instruct"}


def tables() -> list[tuple[str, str]]:
    """Every table with each of its tasks."""
    return [(name, task) for name in list_papers() for task in Paper(name).file.get("tasks", {"": {}})]


def value_at(value: object, key: str) -> object:
    for part in key.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(("name", "task"), tables())
def test_every_difference_from_the_published_settings_has_a_reason(name: str, task: str) -> None:
    paper = Paper(name, task or None)
    assert [str(one) for one in paper.differences() if not one.reason] == []
    trainings = [stage.name for stage in paper.stages if stage.words[0] == "train"]
    assert trainings and all(paper.file["published"].get(stage) for stage in trainings), "nothing to compare with"


def test_sizes_for_a_small_chain_can_be_set_and_are_refused_without_it() -> None:
    stages = {
        stage.name: stage.words for stage in Paper("collabllm/table-1", small=True, overrides=["length=16"]).stages
    }
    assert "episode.max_tokens=16" in stages["ppo"] and stages["evaluate"].count("16") == 1
    with pytest.raises(UserError, match="should read NAME=VALUE"):
        Paper("collabllm/table-1", overrides=["length=16"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_recipes_of_the_stages_have_the_published_settings(name: str) -> None:
    stages = {stage.name: stage.recipe for stage in Paper(name).stages}
    for stage, settings in PUBLISHED[name].items():
        recipe = stages[stage]
        assert recipe is not None
        assert {key: value_at(recipe, key) for key in settings} == settings
        assert settings.items() <= Paper(name).file["published"][stage].items() or name.startswith("classmates/m")


def test_a_changed_setting_is_listed() -> None:
    paper = Paper("collabllm/table-1", overrides=["sft.train.lr=1e-4", "model=smollm2-135m"])
    told = [str(one) for one in paper.differences()]
    assert "sft: train.lr is 0.0001; published: 1e-05" in told
    assert "sft: model.path is smollm2-135m; published: meta-llama/Llama-3.1-8B-Instruct" in told


def test_tables_about_the_same_models_share_a_folder_and_others_have_their_own() -> None:
    folders = {name: Paper(name, "medium" if name.startswith("collabllm") else None).out for name in list_papers()}
    assert len({folder for name, folder in folders.items() if name.startswith("collabllm")}) == 1
    assert folders["classmates/math"] == Path("runs/classmates-math"), "not in the way of classmates/gsm8k"
    assert len({folder for name, folder in folders.items() if name.startswith("classmates")}) == 4


@pytest.mark.parametrize("name", ["classmates/gsm8k", "classmates/math"])
def test_classmates_of_a_model_that_marks_no_thoughts_get_its_replies(name: str) -> None:
    (recipe,) = [stage.recipe for stage in Paper(name).stages if stage.name == "classmates"]
    assert recipe is not None and recipe.model.path.startswith("allenai/OLMo-2")
    assert recipe.futures.options["thought"] == "reply" and recipe.futures.options["keep"] == 0.8


def test_each_training_starts_from_the_one_before_it(tmp_path: Path) -> None:
    stages = {stage.name: stage.recipe for stage in Paper("collabllm/table-1", out=tmp_path).stages}
    starts = {name: recipe.model.path for name, recipe in stages.items() if recipe is not None}
    assert starts == {
        "sft": MODELS["collabllm"],
        "dpo": str(tmp_path / "sft"),
        "online_dpo": str(tmp_path / "dpo"),
        "ppo": str(tmp_path / "sft"),
    }


@pytest.mark.parametrize(("name", "task"), tables())
def test_a_plan_of_all_stages_needs_no_data_and_no_network(
    name: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", name, *(["--task", task] if task else []), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "all stages" in out and "GPU hours" in out and "differs from the published settings" in out
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_a_plan_counts_calls_dollars_and_hours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "collabllm/table-1", "--dry-run"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line[:1].isalpha()}
    # 93 steps of 32 prompts, 2 replies, 3 futures of 2 rounds: as many user turns as judged scores.
    assert "calls" in lines["online_dpo"] and "$" in lines["online_dpo"] and " 0.0 GPU" not in lines["online_dpo"]
    assert "about 0 calls" in lines["sft"] and " 0.0 GPU" not in lines["sft"]


def test_a_plan_counts_the_calls_that_extract_a_document_and_the_verdicts_of_judges() -> None:
    for task in ("math-hard", "medium", "bigcodebench"):  # accuracy or extraction, and interactivity
        (words,) = [stage.words for stage in Paper("collabllm/table-1", task).stages if stage.name == "online_dpo"]
        assert cost_of(words, 8e9, 3000, 0)["calls"] == 94 * 32 * 2 * 3 * (2 + 2)
    stages = {stage.name: stage.words for stage in Paper("classmates/sycophancy").stages}
    assert cost_of(stages["baseline"], 0.0, 8000, 0)["calls"] == 1500 * 16 * 8
    assert cost_of(stages["classmates"], 0.0, 8000, 0)["calls"] == 1500 * 16 * 8 * 2, "the classmate's answers, too"


def test_wrong_names_are_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["collabllm/table-9"], "unknown table 'collabllm/table-9'; did you mean"),
        (["collabllm/table-1", "--task", "maths"], "has no task 'maths'"),
        (["collabllm/table-1", "nonsense=1"], "should read NAME=VALUE with a name of"),
        (["collabllm/table-1", "--verl", "data_rl"], "no training has that name"),
    ):
        assert main(["reproduce", *words, "--dry-run"]) == 2
        assert message in capsys.readouterr().err


def test_a_stage_runs_once_and_a_broken_training_is_resumed(tmp_path: Path) -> None:
    (stage, *_) = Paper("gsm8k-multiturn", out=tmp_path, small=True).stages
    ran: list[Sequence[str]] = []

    def command(words: Sequence[str]) -> int:
        ran.append(words)
        return 2 if len(ran) == 1 else 0

    with pytest.raises(UserError, match="ended with status 2; the same command continues"):
        run_stage(tmp_path / "stages.json", stage, command)
    folder = RunFolder.create(load_recipe(stage.words[1], stage.words[2:]).recipe)
    assert stage.command == list(stage.words), "nothing was reached: it begins anew"
    folder.append_metrics("sft", 1, {})
    assert stage.command == ["train", "--resume", str(stage.folder)]
    run_stage(tmp_path / "stages.json", stage, command)
    run_stage(tmp_path / "stages.json", stage, command)
    assert ran[0] == list(stage.words) and ran[1][:2] == ["train", "--resume"] and len(ran) == 2
    other = Paper("gsm8k-multiturn", out=tmp_path, small=True, overrides=["small_model.train.lr=1e-4"]).stages[0]
    with pytest.raises(UserError, match="was made with other settings"):
        run_stage(tmp_path / "stages.json", other, command)


def test_a_training_that_has_begun_is_not_resumed_under_other_settings(tmp_path: Path) -> None:
    def stage(*overrides: str) -> PaperStage:
        return Paper("gsm8k-multiturn", out=tmp_path, small=True, overrides=overrides).stages[0]

    recipe = stage().recipe
    assert recipe is not None
    RunFolder.create(recipe).append_metrics("sft", 1, {})
    with pytest.raises(UserError, match=r"was made with other settings \(train.lr=0.005\); choose another --out"):
        run_stage(tmp_path / "stages.json", stage("small_model.train.lr=1e-4"), lambda words: 0)
    run_stage(tmp_path / "stages.json", stage(), lambda words: 0)


def test_the_table_says_how_many_scores_are_missing(tmp_path: Path) -> None:
    paper = Paper("collabllm/table-1", out=tmp_path)
    cells = {"task metric": {"mean": 12.0, "missing": {"timeout": 2, "refused": 1}}, "k-tokens": {"missing": {}}}
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "evaluate" / "table.json").write_text(json.dumps({"cells": {"base": cells}}))
    assert paper.table()[1] == ["base", "12.0 (11), 3 missing", "– (3.4)"]


def test_what_the_stages_cost_is_printed_before_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("upshot.offline.reproduce.run_stage", lambda *_: print("a stage"))
    monkeypatch.setattr("upshot.offline.reproduce.print_paper", lambda _: None)
    assert main(["reproduce", "collabllm/table-1", "--out", str(tmp_path)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("all stages") and "calls" in first and "$" in first and second == "a stage"


def test_an_interrupted_stage_ends_the_command_like_an_interrupt(tmp_path: Path) -> None:
    (stage, *_) = Paper("gsm8k-multiturn", out=tmp_path, small=True).stages
    with pytest.raises(KeyboardInterrupt):
        run_stage(tmp_path / "stages.json", stage, lambda words: 130)
    assert not (tmp_path / "stages.json").exists()


def test_a_stage_on_verl_is_trained_there() -> None:
    stages = {stage.name: stage for stage in Paper("collabllm/table-1", verl=["ppo"]).stages}
    assert stages["ppo"].command[-2:] == ["--engine", "verl"] and "--engine" not in stages["sft"].command


def test_verls_own_settings_go_to_the_stage_on_verl_and_not_into_its_recipe() -> None:
    words = ["trained.trainer.n_gpus_per_node=1", "trained.+ray_kwargs.ray_init.num_gpus=1", "trained.train.lr=2e-6"]
    stages = {s.name: s for s in Paper("gsm8k-multiturn", overrides=words, verl=["trained"]).stages}
    trained = stages["trained"]
    assert trained.recipe is not None and trained.recipe.train.lr == 2e-6
    ending = ["trainer.n_gpus_per_node=1", "+ray_kwargs.ray_init.num_gpus=1", "--engine", "verl"]
    assert trained.command[-4:] == ending and ending[0] not in trained.words


def test_the_plan_of_a_stage_on_verl_is_the_command_that_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "gsm8k-multiturn", "--verl", "trained", "--dry-run"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "--engine verl" in line]
    assert line.split()[:3] == ["upshot", "train", "gsm8k-multiturn"]


def test_the_whole_chain_with_small_sizes_prints_the_table_and_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", "gsm8k-multiturn", "--small", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert "small_model: upshot train" in capsys.readouterr().out
    assert main(words) == 0
    again = capsys.readouterr().out
    assert again.count("done before") == 4 and "GSM8K in several turns: ours (published)" in again
    assert "trained: train.prompts_per_step is 2; published: 8" in again
    done = json.loads((tmp_path / "out" / "stages.json").read_text())
    assert list(done) == [stage.name for stage in Paper("gsm8k-multiturn", out=tmp_path / "out", small=True).stages]
    assert "| base |" in (tmp_path / "out" / "table.md").read_text()
    assert_a_table_was_written(tmp_path / "out")


CHAIN = ("collabllm/table-1", "collabllm/table-2", "collabllm/safety")
"""Tables about the same trained models."""


@pytest.mark.parametrize("task", ["math-hard", "medium", "bigcodebench"])
def test_tables_about_the_same_models_run_to_their_last_stage_and_train_them_once(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: set[str] = set()
    for name in CHAIN:
        assert main(["reproduce", name, "--task", task, "--small", "--out", str(tmp_path / "o")]) == 0
        stages = {stage.name for stage in Paper(name, task, tmp_path / "o", small=True).stages}
        assert capsys.readouterr().out.count("done before") == len(stages & trained)
        trained |= stages
        assert json.loads((tmp_path / "o" / "stages.json").read_text()).keys() == trained
        assert_a_table_was_written(tmp_path / "o")
    assert {"sft", "dpo", "online_dpo", "ppo", "evaluate", "ambiguity", "safety"} <= trained


ALONE = [(name, task) for name, task in tables() if name not in (*CHAIN, "gsm8k-multiturn")]
"""The table about several turns is the chain that is run in full above."""


@pytest.mark.parametrize(("name", "task"), ALONE)
def test_every_other_table_runs_from_its_first_stage_to_its_last(name: str, task: str, tmp_path: Path) -> None:
    assert main(["reproduce", name, *(["--task", task] if task else []), "--small", "--out", str(tmp_path / "o")]) == 0
    done = json.loads((tmp_path / "o" / "stages.json").read_text())
    assert list(done) == [stage.name for stage in Paper(name, task or None, tmp_path / "o", small=True).stages]
    assert_a_table_was_written(tmp_path / "o")


def assert_a_table_was_written(out: Path) -> None:
    rows = [line for line in (out / "table.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) >= 4 and "differs" not in rows[0]
