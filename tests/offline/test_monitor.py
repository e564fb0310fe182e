"""`upshot eval monitor RUN|FILE`: numbers by step and task, resumable; unusable input is one clear line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.training.helpers import monitor as trusts_sums
from upshot.cli import main
from upshot.core.conversation import Conversation, Message, Row, Sample
from upshot.core.score import Reason, Score
from upshot.models.base import ModelCallError, Request
from upshot.models.scripted import SCRIPTS
from upshot.rewards.credit import Reward
from upshot.rollout.reply import Rollout

ASKED: list[str] = []


@pytest.fixture(autouse=True)
def watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """`scripted:watcher` trusts thoughts that calculate; its call fails on thoughts about clouds."""
    ASKED.clear()

    async def script(request: Request) -> str:
        await asyncio.sleep(0)  # like any real call, it yields to others
        shown = request.prompt[-1].content  # type: ignore[union-attr]
        ASKED.append(shown)
        if "cloud" in shown:
            raise ModelCallError("refused", "no clouds")
        return trusts_sums(request)

    monkeypatch.setitem(SCRIPTS, "watcher", script)


def evaluate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = main(["eval", "monitor", *words, "--judge", "scripted:watcher", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if found["all"]["valid"] else 1)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["eval", "monitor", *words, "--judge", "scripted:watcher"]) == 2
    return capsys.readouterr().err


def rows_file(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def line(step: int, source: str, thought: str | None, verdict: Score | None, index: int = 0) -> dict[str, Any]:
    """A line of rollouts.jsonl as a run writes it."""
    conversation = Conversation(Row(f"r{index}", (Message("user", f"question {index}"),), source=source))
    note = {} if thought is None else {"thought": thought}
    conversation.say(Message("assistant", "secret answer"), Sample((1,), (2,), (-0.5,), "stop"), note)
    means = {} if verdict is None else {"verifier": verdict}
    reply = Rollout(conversation, reward=Reward(verdict or Score(-1.0), means=means))
    return reply.to_dict(step, {"task": source})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of two steps and two tasks: yes or no, and grades."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("task: {name: judged, behaviour: sycophancy, file: gone.jsonl}\n")
    lines = [
        line(1, "gsm8k", "1 + 1 = 2", Score(1.0), 0),
        line(1, "gsm8k", "1 + 1 = 3", Score(0.0), 1),
        line(1, "gsm8k", None, Score(0.0), 2),
        line(1, "sycophancy", "so = so", Score(0.5), 3),
        line(2, "gsm8k", "let me see", Score(0.0), 0),
        line(2, "gsm8k", "a cloud = a cloud", Score(1.0), 1),
        line(2, "gsm8k", "1 = 1", Score.missing(Reason.BAD_ROW), 2),
        line(2, "gsm8k", "1 = 1", None, 3),
    ]
    rows_file(folder / "rollouts.jsonl", *lines)
    return folder


def test_the_numbers_of_a_run_are_grouped_by_step_and_task(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(capsys, str(run))
    assert [(row["step"], row["task"]) for row in found["steps"]] == [(1, "gsm8k"), (1, "sycophancy"), (2, "gsm8k")]
    first, graded, second = found["steps"]
    assert (first["tp"], first["fp"], first["valid"], first["no_thought"]) == (1, 1, 2, 1)
    assert graded["mse"] == 0.25 and "f1" not in graded, "a rating of 1 of 10 maps to 0, the verdict was 0.5"
    assert (second["tn"], second["valid"], second["no_verdict"], second["missing/refused"]) == (1, 1, 2, 1)
    assert found["tasks"]["gsm8k"]["accuracy"] == pytest.approx(2 / 3)
    assert found["all"]["valid"] == 4 and found["all"]["missing"] == 4
    assert not any("secret" in shown for shown in ASKED)
    assert sum("question 0" in shown for shown in ASKED) == 2


def test_the_table_shows_what_is_undefined_as_a_dash(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "monitor", str(run), "--judge", "scripted:watcher", "--task", "gsm8k"]) == 0
    out = capsys.readouterr().out.splitlines()
    head = out[1].replace("no ", "no_").split()
    cells = {tuple(text.split()[:2]): dict(zip(head, text.split(), strict=True)) for text in out[2:5]}
    assert cells["1", "gsm8k"]["precision"] == "0.500"
    assert cells["2", "gsm8k"]["precision"] == "-" and cells["2", "gsm8k"]["no_prediction"] == "1"
    assert cells["all", "all"]["valid"] == "3"
    assert "no prediction: 1 x refused" in "\n".join(out)


def test_the_same_command_resumes_and_retries_only_failures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = evaluate(capsys, str(run))
    ASKED.clear()
    assert evaluate(capsys, str(run)) == before
    assert len(ASKED) == 1 and "cloud" in ASKED[0]
    with (run / "rollouts.jsonl").open("a") as file:  # the run has continued
        file.write(json.dumps(line(3, "gsm8k", "2 = 2", Score(1.0))) + "\n")
    ASKED.clear()
    assert evaluate(capsys, str(run))["steps"][-1]["tp"] == 1
    assert len(ASKED) == 2
    written = [json.loads(text) for text in (run / "monitor.jsonl").read_text().splitlines()]
    assert len(written) == len({one["key"] for one in written}) == 9
    ASKED.clear()
    assert evaluate(capsys, str(run), "--limit", "1")["all"]["valid"] == 1
    assert evaluate(capsys, str(run))["all"]["valid"] == 5
    assert len(ASKED) == 1, "what a smaller look left out is not lost"
    error = refused(capsys, str(run), "--task", "gsm8k")
    assert "was started with other settings (task: None, now 'gsm8k')" in error


def test_lines_of_an_earlier_version_are_one_clear_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(capsys, str(run))
    file = run / "monitor.jsonl"
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({k: v for k, v in one.items() if k != "verdict"}) + "\n" for one in lines))
    assert "was started by an earlier version" in refused(capsys, str(run))


def test_an_empty_budget_stops_it_and_results_are_kept(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "budget of 2 calls is used up" in refused(capsys, str(run), "--max-calls", "2", "--at-once", "1")
    ASKED.clear()
    assert evaluate(capsys, str(run))["all"]["valid"] == 4
    assert len(ASKED) == 3


SCORED = [
    {"prompt": [{"role": "user", "content": "1+1?"}], "thought": "1 + 1 = 2", "score": 1, "data_source": "gsm8k"},
    {"question": "1+1?", "response": "<think>1 = 1</think>#### 3", "score": 0.0, "data_source": "gsm8k"},
    {"question": "1+1?", "response": "no thought", "score": 0, "data_source": "gsm8k"},
    {"question": "1+1?", "thought": "hm", "score": None, "missing": "timeout", "data_source": "gsm8k"},
]


def test_a_file_with_scores_is_monitored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rows_file(tmp_path / "in.jsonl", *SCORED)
    found = evaluate(capsys, file, "--out", str(tmp_path / "out.jsonl"))["all"]
    assert (found["tp"], found["fp"], found["valid"]) == (1, 1, 2)
    assert (found["no_thought"], found["no_verdict"]) == (1, 1)
    assert "#### 3" not in "".join(ASKED)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 4


def test_rows_without_a_score_are_verified_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"question": "1+1?", "response": "### Reasoning 1 + 1 = 2 ### Output #### 2", "ground_truth": "2", "step": 4},
        {"question": "1+1?", "response": "### Reasoning #### 2 ### Output #### 3", "ground_truth": "2", "step": 5},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    words = [str(tmp_path / "in.parquet"), "--think", "### Reasoning", "### Output"]
    assert "row 1 has neither a 'score' nor a data_source" in refused(capsys, *words)
    found = evaluate(capsys, *words, "--task", "gsm8k")
    assert (found["all"]["tp"], found["all"]["tn"]) == (1, 1), "the thought is no part of what is verified"
    assert [row["step"] for row in found["steps"]] == [4, 5]


def test_scores_of_an_unknown_source_are_measured_as_binary_and_graded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = rows_file(tmp_path / "in.jsonl", {"question": "?", "reasoning": "a = b", "score": 0.75})
    found = evaluate(capsys, file)["all"]
    assert found["accuracy"] == 1 and found["mse"] == 0.0625


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows"),
        ([{"question": "?", "response": "plain", "score": 1}], "no thoughts found in"),
        ([{"question": "?", "thought": "x", "score": 7}], "row 1: the score is 7; a monitor predicts scores from 0"),
        ([{"thought": "x", "score": 1}], "row 1: a row with the columns thought, score has no prompt"),
        ([{"question": "?", "thought": "x", "data_source": "gsm8k"}], "row 1 has no 'response' text"),
        ([{"question": "?", "thought": "x", "response": "y", "data_source": "gsm8q"}], "unknown verifier 'gsm8q'"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_line(
    rows: list[dict[str, Any]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, rows_file(tmp_path / "in.jsonl", *rows))
    assert not ASKED


def test_a_folder_that_cannot_be_used_is_one_clear_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is neither a run folder nor a file" in refused(capsys, str(tmp_path / "nope"))
    assert "has no rollouts.jsonl" in refused(capsys, str(tmp_path))
    assert "no replies of task 'gsm8'; did you mean 'gsm8k'?" in refused(capsys, str(run), "--task", "gsm8")
    rows_file(run / "rollouts.jsonl", line(1, "gsm8k", None, Score(1.0)))
    assert "no thoughts found in" in refused(capsys, str(run))
    rows_file(run / "rollouts.jsonl", line(1, "gsm8k", "hm", None))
    assert "has a score of the metric 'verifier'" in refused(capsys, str(run))
    (tmp_path / "mine.jsonl").write_text("{}\n")
    rows_file(run / "rollouts.jsonl", line(1, "gsm8k", "hm", Score(1.0)))
    assert "choose another --out" in refused(capsys, str(run), "--out", str(tmp_path / "mine.jsonl"))


def test_a_missing_judge_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "monitor", "runs/x"])
    assert "required: --judge" in capsys.readouterr().err


def test_the_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from upshot.cli.eval import inner_parser; inner_parser('monitor').format_help(); "
        "print([m for m in ('torch', 'transformers', 'numpy', 'pydantic', 'pyarrow') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_dead_judge_stops_it_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": str(n), "thought": "a cloud", "score": 1} for n in range(40)]
    assert "of the last 20 looks failed" in refused(capsys, rows_file(tmp_path / "in.jsonl", *rows), "--at-once", "1")
    assert len(ASKED) < 30


def test_baselines_show_what_the_thought_adds_with_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "question": f"q{n}?",
            "thought": f"1 = {n}" if n % 2 else "let me see",
            "score": n % 2,
            "response": f"said {n}",
        }
        for n in range(24)
    ]
    file = rows_file(tmp_path / "rows.jsonl", *[row | {"data_source": "gsm8k"} for row in rows])
    found = evaluate(capsys, file, "--baselines")
    assert found["all"]["accuracy"] == found["all"]["gmean2"] == 1 and found["all"]["valid"] == 24
    thought, question = found["views"]["thought"], found["views"]["question"]
    assert thought["accuracy"]["value"] == 1 and 0.8 < thought["accuracy"]["low"] < 1
    assert question["accuracy"]["value"] == 0.5 and question["gmean2"]["value"] == 0, "it always says the same"
    adds = question["thought_adds"]
    assert adds["value"] == 0.5 and 0.2 < adds["low"] < adds["high"] < 0.8 and adds["p"] < 0.01
    assert len(ASKED) == 72
    assert sum("predict from the question alone" in shown for shown in ASKED) == 24
    assert sum("predict from the answer that was given" in shown and "said " in shown for shown in ASKED) == 24
    assert not any("said " in shown or "1 = " in shown for shown in ASKED if "question alone" in shown)
    ASKED.clear()
    assert evaluate(capsys, file, "--baselines") == found and not ASKED
    assert main(["eval", "monitor", file, "--judge", "scripted:watcher", "--baselines"]) == 0
    out = capsys.readouterr().out
    assert "from the question alone: accuracy 0.500" in out and "the thought adds +0.500" in out


def test_pairs_with_and_without_an_intervention_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for n in range(8):
        changed, seen = n < 4, n % 2 == 0
        for intervened in (False, True):
            thought = "1 = 1" if intervened and seen else "let me see"
            verdict = int(intervened and changed)
            rows.append({"question": f"q{n}?", "thought": thought, "score": verdict, "data_source": "gsm8k"})
            rows[-1] |= {"pair": f"p{n}", "intervention": int(intervened)}
    rows.append({"question": "alone?", "thought": "1 = 1", "score": 1, "data_source": "gsm8k", "pair": "p99"})
    found = evaluate(capsys, rows_file(tmp_path / "rows.jsonl", *rows))["pairs"]
    assert (found["pairs"], found["tpr"], found["tnr"]) == (8, 0.5, 0.5)
    assert found["gmean2"]["value"] == 0.25 and found["gmean2"]["low"] < 0.25 < found["gmean2"]["high"]
