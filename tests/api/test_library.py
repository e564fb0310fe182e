"""Upshot as a library: typed public names, recipes and runs as values, the loop in pieces."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import tomllib
import traceback
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import upshot
from upshot.api.settings import RewardOptions, Setting
from upshot.core.errors import UserError
from upshot.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
OPENING = [{"role": "user", "content": "Can you help me?"}]
THIMBLE: dict[str, Any] = {
    "name": "thimble",
    "model": {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32}},
    "task": {"name": "slots", "rows_per_split": 32},
    "episode": {"max_tokens": 4},
    "futures": {"samples": 1, "rounds": 1},
    "train": {"steps": 1, "prompts_per_step": 2, "group_size": 2, "lr": 1e-3},
}


def brief(conversation: upshot.Conversation) -> float:
    return 1.0 / (1 + len(conversation.messages[-1].content.split()))


def test_every_public_name_is_there_listed_and_documented() -> None:
    assert {"load", "train", "reward", "runs", "Trainer", "Row", "Task", "Metric"} <= set(dir(upshot))
    for name in upshot.__all__:
        thing = getattr(upshot, name)
        assert name == "__version__" or thing.__doc__, name


def test_importing_upshot_imports_nothing_heavy() -> None:
    code = "import sys, upshot; dir(upshot); upshot.Row; print([m for m in ('torch', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_upshot_train_can_be_called_before_and_after_its_modules_are_imported() -> None:
    import upshot.run.folder

    assert callable(upshot.train) and upshot.run.folder.RunFolder


def test_every_option_of_reward_has_a_default_and_says_what_it_is() -> None:
    for name, hint in get_type_hints(RewardOptions, include_extras=True).items():
        (setting,) = hint.__metadata__
        assert isinstance(setting, Setting) and setting.help, name


def test_the_defaults_of_reward_pass_their_own_checks() -> None:
    from upshot.api.reward import check_options

    defaults = check_options({})
    assert check_options(defaults) == defaults


def test_an_editable_install_is_a_path_that_type_checkers_follow() -> None:
    """For this layout setuptools writes a plain path instead of an import hook, which mypy and pyright could not
    follow."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"] == {"": "."}
    assert (ROOT / "upshot" / "py.typed").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replies": 3}, r"replies = 3: input should be a valid list"),
        ({"replies": ["a", 3]}, r"replies.1 = 3: input should be a valid string"),
        ({"messages": "hello"}, r"messages is 'hello': give a list, such as"),
        ({"messages": ["hello"]}, r"messages\[0\] is 'hello': a message is \{'role'"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\] is .*'content': 'text'"),
        ({"samples": "many"}, r"samples = 'many': input should be a valid integer"),
        ({"samples": 0}, r"samples = 0: input should be greater than or equal to 1"),
        ({"temperature": float("nan")}, r"temperature = nan: input should be"),
        ({"judge": 3}, r"judge is 3 \(int\): a model is an address"),
        ({"metrics": "accuracy"}, r"metrics is 'accuracy': give \{name or function: weight\}"),
        ({"metrics": {"accuracy": "much"}}, r"the weight of metric 'accuracy' = 'much': input should be"),
        ({"seed": "x"}, r"seed = 'x': input should be"),
        ({"ronds": 1}, r"did you mean 'rounds'"),
    ],
)
def test_a_wrong_type_in_reward_is_one_line_without_a_traceback(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"messages": OPENING, "replies": "Hm?", "rounds": 0, "metrics": [brief]} | arguments
    with pytest.raises(UserError, match=message) as said:
        upshot.reward(**given)
    told = "".join(traceback.format_exception(said.value))
    assert "During handling" not in told and "direct cause" not in told and "ExceptionGroup" not in told


def test_functions_are_metrics_of_reward() -> None:
    (short, long) = upshot.reward(
        OPENING, ["a", "a b c"], rounds=0, metrics={brief: 2.0, "token_amount": 0}, tokenizer=Words()
    )
    assert [reply.reward.total.value for reply in (short, long)] == [1.0, 0.5]


class Words:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(range(len(text.split())))


def test_a_recipe_is_loaded_with_overrides_of_any_shape() -> None:
    recipe = upshot.load("quickstart", train={"steps": 3}, reward={"metrics": [brief]}, **{"futures.rounds": 1})
    assert (recipe.train.steps, recipe.train.lr, recipe.futures.rounds) == (3, 4e-4, 1)
    assert upshot.load(recipe, seed=5).seed == 5
    assert upshot.load(THIMBLE).name == "thimble"
    with pytest.raises(UserError, match=r"unknown key 'stepz' in train; did you mean 'steps'") as said:
        upshot.load("quickstart", train={"stepz": 3})
    assert "During handling" not in "".join(traceback.format_exception(said.value))


def test_a_run_is_trained_and_read_as_tables(tmp_path: Path) -> None:
    metrics = [{"name": "verifier"}, brief]
    run = upshot.train(THIMBLE, run_dir=str(tmp_path / "run"), reward={"metrics": metrics})
    assert run.status["state"] == "finished" and run.checkpoint is not None and run.checkpoint.is_dir()
    assert [line["step"] for line in run.metrics] == [1] and run.recipe.name == "thimble"
    assert len(run.replies) == 4 and all(0 < reply["brief"] <= 1 for reply in run.replies)
    assert {future["reply"] for future in run.futures} == {line["key"] for line in run.rollouts}
    assert [found.path for found in upshot.runs.find(tmp_path)] == [run.path]
    with pytest.raises(UserError, match="is not a run folder"):
        upshot.runs.read(tmp_path)


def test_training_works_where_an_event_loop_runs(tmp_path: Path) -> None:
    async def notebook() -> str:
        return str(upshot.train(THIMBLE, run_dir=str(tmp_path / "run")).status["state"])

    assert asyncio.run(notebook()) == "finished"


def test_records_are_data_and_stay_with_the_run(tmp_path: Path) -> None:
    talks = [{"messages": [*OPENING, {"role": "assistant", "content": "which size ?"}]} for _ in range(4)]
    train = {"method": "sft", "steps": 1, "prompts_per_step": 2}
    run = upshot.train(THIMBLE, (talk for talk in talks), run_dir=str(tmp_path / "run"), train=train)
    assert run.metrics[0]["loss/nll"] > 0
    assert Path(run.recipe.train.data or "").read_text().count("which size ?") == 4
    with pytest.raises(UserError, match=r"data\[0\] is 'x' \(str\): a row is a mapping"):
        upshot.train(THIMBLE, ["x"], run_dir=str(tmp_path / "other"), train=train)  # type: ignore[list-item]


def test_the_loop_in_pieces_changes_the_weights_by_what_was_scored() -> None:
    async def loop() -> tuple[list[list[float | None]], dict[str, float]]:
        words = ["which", "size", "please", "here", "is", "a", "lamp", "?"]
        trainer = Trainer.tiny(words, shape={"hidden": 16, "layers": 1, "heads": 2, "mlp": 32}, max_tokens=4, lr=1e-2)
        before = [p.detach().clone() for p in trainer.learner.parameters]
        trainer.imitate([[upshot.Message("user", "a lamp please"), upshot.Message("assistant", "here is a lamp")]])
        trainer.step()
        groups = await trainer.sample([upshot.Row("r", (upshot.Message("user", "a lamp please"),))], 4, seed=1)
        rewards = await trainer.score(groups, upshot.talk({brief: 1.0}))
        logs = trainer.forward_backward(groups) | trainer.step()
        assert any((old != new).any() for old, new in zip(before, trainer.learner.parameters, strict=True))
        await trainer.aclose()
        return rewards, logs

    rewards, logs = asyncio.run(loop())
    assert len(rewards[0]) == 4 and all(0 < value <= 1 for value in rewards[0] if value is not None)
    assert "loss/policy" in logs and logs["train/grad_norm"] >= 0


def test_a_run_separates_steps_from_evaluations_and_renders_in_a_notebook(tmp_path: Path) -> None:
    run = upshot.train(THIMBLE, run_dir=str(tmp_path / "run"), train={"steps": 2}, eval={"every": 1, "rows": 2})
    assert "reward/mean" not in run.metrics[-1]  # the last line belongs to an evaluation
    assert [line["step"] for line in run.steps if line["phase"] == "rl"] == [1, 2]
    assert run.steps[-1]["reward/mean"] is not None
    assert [line["step"] for line in run.evals] == [0, 1, 2] and "reward/mean" in run.evals[0]
    assert run.best is not None and run.best.parent == run.checkpoints.path
    assert "reward/mean" in run._repr_html_() and "finished" in repr(run)


def test_a_reply_renders_in_a_notebook_and_its_text_stays_inert() -> None:
    reply = upshot.reward([{"role": "user", "content": "hi"}], "<script>x</script>", metrics={brief: 1}, rounds=0)
    page = reply._repr_html_()
    assert "&lt;script&gt;" in page and "<script>" not in page and "brief" in page


def test_the_signature_of_train_names_every_part_of_a_recipe() -> None:
    for function in (upshot.load, upshot.train):
        assert set(upshot.Recipe.model_fields) <= set(inspect.signature(function).parameters)


def test_a_run_folder_works_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path in its recipe would point to another file from there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "rows.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n')
    recipe = upshot.load("gsm8k-smollm2", task={"file": "own/rows.jsonl"}, run_dir="runs/one")
    folder = upshot.runs.RunFolder.create(recipe)
    place = folder.path.absolute()
    monkeypatch.chdir("/")
    assert upshot.runs.read(place).recipe.task.options["file"] == str(tmp_path / "own" / "rows.jsonl")


def test_exporting_a_run_that_never_learned_says_so(tmp_path: Path) -> None:
    from upshot.run.export import export

    folder = upshot.runs.RunFolder.create(upshot.load("quickstart", run_dir=str(tmp_path / "run")))
    with pytest.raises(upshot.UserError, match="it finished no step"):
        export(folder)
