"""What a dry run finds by playing one row, and its estimate of tokens and cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from upshot.cli import main
from upshot.config.load import load_recipe
from upshot.run.checks.trial import try_out
from upshot.run.forecast import estimate
from upshot.tasks.base import tasks

SMALL = ["task.rows_per_split=32"]


def test_a_metric_that_fails_is_named_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_metric.py").write_text("def odd(conversation):\n    return 1 / 0\n")
    assert main(["train", "quickstart", *SMALL, "reward.metrics=[verifier, odd_metric:odd]", "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert "metric 'odd' fails on a trial row" in told and "(odd_metric.py, line 2)" in told


def test_a_good_recipe_passes_its_trial_and_untested_parts_are_named() -> None:
    assert list(try_out(load_recipe("quickstart", SMALL).recipe)) == []
    local = load_recipe("quickstart", [*SMALL, "models.judge=smollm2-135m"]).recipe
    [note] = try_out(local)
    assert not note.fatal and "judge" in note.says


def test_tokens_and_dollars_are_estimated_before_anything_is_spent() -> None:
    words = [
        "models.user=http://h.example/v1#u",
        "models.judge={url: 'http://h.example/v1#j', price_in: 1, price_out: 4}",
    ]
    recipe = load_recipe("collabllm-grpo", [*words, "train.steps=10"]).recipe
    lines = estimate(recipe, tasks.create(recipe.task.name, recipe.task.options, "task"), 10)
    assert lines[0].startswith("tokens     about ")
    judge = next(line for line in lines if "judge:" in line)
    assert "calls" in judge and "$" in judge
    assert "price_in" in next(line for line in lines if "user:" in line)


def test_positions_beyond_the_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", *SMALL, "model.max_context=1000", "--dry-run"]) == 2
    assert "the model has 256 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "file", "line"),
    [
        (
            "sft",
            "talks.jsonl",
            '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}',
        ),
        ("dpo", "pairs.jsonl", '{"prompt": "hi", "chosen": "hello", "rejected": "no"}'),
        ("grpo", "qa.jsonl", '{"question": "what is 1 + 1?", "answer": "2"}'),
    ],
)
def test_the_plain_recipes_accept_a_users_own_file(
    recipe: str,
    file: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text("".join(line.replace("1 + 1", f"{n} + 1") + "\n" for n in range(40)))
    assert main(["train", recipe, "eval.every=0", "--dry-run", "--offline"]) == 0, capsys.readouterr().err
    assert recipe in capsys.readouterr().out
