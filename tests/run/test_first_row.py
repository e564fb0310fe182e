"""A dry run shows the first prompt and the verifier's verdicts on it, and warns if these verdicts teach nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from upshot.cli import main
from upshot.config.load import load_recipe
from upshot.core.conversation import Row
from upshot.core.score import Score
from upshot.run.checks.first_row import _findings as findings_of
from upshot.run.checks.first_row import show_first_row


def first_row(path: Path, answers: list[str]) -> tuple[list[str], list[str]]:
    rows = ({"question": f"number {number}?", "answer": answer} for number, answer in enumerate(answers))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = load_recipe("grpo", {"model.path": "hub/not-here", "task.file": str(path), "eval.every": 0}).recipe
    lines, findings = show_first_row(recipe, offline=True)
    assert not any(finding.fatal for finding in findings)
    return lines, [finding.says for finding in findings]


def test_prompt_reference_and_three_verdicts_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", "--dry-run"]) == 0
    told = capsys.readouterr()
    assert "first row  " in told.out and "reference  here is a " in told.out
    assert "its reference: right · an empty reply: wrong · another row's reference: wrong" in told.out
    assert "note" not in told.err


def test_an_answer_is_tried_in_the_form_that_the_task_gives_it() -> None:
    lines, findings = show_first_row(load_recipe("withheld", {}).recipe, offline=True)
    assert "its reference: right" in lines[-1] and not findings


def test_gsm8ks_worked_solutions_are_recognised(tmp_path: Path) -> None:
    solutions = [f"Ann has {n} apples and buys {n} more.\nSo she has {2 * n}.\n#### {2 * n}" for n in range(1, 9)]
    lines, says = first_row(tmp_path / "train.jsonl", solutions)
    assert any("number" in line for line in lines)
    assert len(says) == 1 and says[0].endswith("a reply must contain all of it: set task.name=gsm8k")
    assert first_row(tmp_path / "plain.jsonl", ["4", "7", "9"] * 4)[1] == []


def test_equal_verdicts_give_a_warning_and_missing_ones_do_not() -> None:
    def says(**verdicts: Score) -> list[str]:
        named = {what.replace("_", " "): verdict for what, verdict in verdicts.items()}
        return [finding.says for finding in findings_of("mine", Row("1", (), reference="4"), named)]

    wrong, right, missing = Score(0.0), Score(1.0), Score.missing("error")
    assert says(its_reference=right, an_empty_reply=wrong) == says(its_reference=missing, an_empty_reply=missing) == []
    assert says(its_reference=wrong, an_empty_reply=right) == [
        "the verifier calls its reference wrong for the first row, so it can reward nothing",
        "the verifier calls an empty reply right for the first row, so it rewards what is wrong",
    ]
