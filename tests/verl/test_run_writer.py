"""A run on verl in the run folder: rollouts, lines, evaluations, status, as a run of local mode writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe
from upshot.core.conversation import Conversation, Message, Row, Sample, Turn
from upshot.core.files import read_jsonl
from upshot.core.score import Reason, Score
from upshot.rewards.credit import MAIN, Credit, Span
from upshot.rewards.reward import Reward
from upshot.rollout.rollout import Rollout
from upshot.run import folder as runs
from upshot.run.folder import RunFolder
from upshot.run.report.report import write_report
from upshot.run.reporter import Reporter
from upshot.tasks.slots import SlotsTask
from upshot.training.loops.rl import set_advantages
from upshot.training.metrics.best import evaluated_step
from upshot.verl.folder import rollout_exchange
from upshot.verl.folder.run_writer import VerlRunWriter
from upshot.verl.metrics import Follower

TASK = SlotsTask(rows_per_split=64)


def reply_to(row: Row, total: Score, group: int, session: int) -> Rollout:
    sample = Sample((5, 6, 7), (8, 9), (-0.5, -0.25), "stop")
    talk = Conversation(row, 7, f"{row.id}#{session}")
    talk.turns = (*talk.turns, Turn(Message("assistant", "a red lamp"), sample))
    credit = None if total.is_missing else Credit({MAIN: total}, (Span(3, 5, (MAIN,)),))
    return Rollout(talk, group, reward=Reward(total, means={"verifier": total}), credit=credit)


class Stage:
    """A run folder and processes that write to it as verl's do."""

    def __init__(self, tmp: Path, *words: str) -> None:
        own = ["task.rows_per_split=64", "warm_start=null", f"model.path={tmp / 'model'}", f"run_dir={tmp / 'run'}"]
        self.recipe: Recipe = load_recipe("quickstart", ["credit.by=reply", *own, *words]).recipe
        self.folder = RunFolder.create(self.recipe)
        self.run = self.folder.path
        self.log = self.run / "verl" / "metrics.jsonl"
        self.rows = TASK.rows("train")

    def chronicle(self, reporter: Reporter | None = None) -> VerlRunWriter:
        return VerlRunWriter(
            self.recipe, self.folder, Follower(self.log), TASK, lambda ids: [str(token) for token in ids], reporter
        )

    def play(self, step: int, scores: list[list[Score]]) -> None:
        """verl's trainer has learned from a step."""
        groups = [
            [reply_to(self.rows[group], score, group, session) for session, score in enumerate(own)]
            for group, own in enumerate(scores)
        ]
        set_advantages(groups, self.recipe.train.advantage)
        rollout_exchange.note(self.run, step, groups)

    def told(self, step: int, **data: Any) -> None:
        """verl logs a step."""
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("a") as file:
            file.write(json.dumps({"step": step, "data": data}) + "\n")


@pytest.fixture
def context(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def ones(*values: float) -> list[Score]:
    return [Score(value) for value in values]


DOWN = Score.missing(Reason.CONNECTION, "the server is down")
STEP = {"actor/grad_norm": 2.0, "upshot/reward/mean": 0.5, "timing_s/step": 3.0}


def test_a_step_is_in_the_run_folder_when_verl_has_logged_it_and_not_before(context: Stage) -> None:
    chronicle = context.chronicle()
    chronicle.begin(2, 0)
    context.play(1, [ones(1.0, 0.0), ones(1.0, 1.0)])
    assert chronicle.follow() == 0 and not (context.run / "rollouts.jsonl").exists()
    context.told(1, **STEP)
    assert chronicle.follow() == 1
    lines = read_jsonl(context.run / "rollouts.jsonl")
    assert [(line["step"], line["group"], line["key"]) for line in lines] == [
        (1, group, f"{context.rows[group].id}#{session}") for group in (0, 1) for session in (0, 1)
    ]
    assert lines[0]["goal"] == context.rows[0].goal and lines[0]["groups"]
    assert [line["credit"][0]["advantage"] for line in lines[2:]] == [0.0, 0.0]
    assert lines[0]["credit"][0]["advantage"] == -lines[1]["credit"][0]["advantage"] > 0
    assert (context.run / "samples/000001.npz").is_file()
    assert not list((context.run / rollout_exchange.FOLDER).iterdir()), "what was carried over is taken away"


def test_what_is_missing_is_there_with_its_reason_and_out_of_the_statistics(context: Stage) -> None:
    chronicle = context.chronicle()
    chronicle.begin(1, 0)
    context.play(1, [[Score(1.0), DOWN, Score(0.0)]])
    context.told(1, **STEP)
    chronicle.follow()
    line = read_jsonl(context.run / "rollouts.jsonl")[1]
    assert line["reward"]["total"]["missing"] == Reason.CONNECTION
    assert line["reward"]["total"]["detail"]["why"] == "the server is down"
    (told,) = read_jsonl(context.run / "metrics.jsonl")
    assert line["credit"] == []
    assert (told["train/grad_norm"], told["time/step"], told["reward/mean"]) == (2.0, 3.0, 0.5)
    assert told["task/missing"] == 1.0 and any(name.startswith("by/opening=") for name in told)


def test_an_evaluation_is_a_line_of_its_own_of_the_weights_after_its_step(context: Stage) -> None:
    chronicle = context.chronicle()
    chronicle.begin(5, 0)
    context.told(0, **{"upshot/eval/reward/mean": 0.25, "val-core/slots/reward/mean@1": 0.25})
    context.play(5, [ones(1.0, 0.0)])
    context.told(5, **STEP, **{"upshot/eval/reward/mean": 1.0, "timing_s/testing": 1.5})
    chronicle.follow()
    before, step, after = read_jsonl(context.run / "metrics.jsonl")
    assert before == {"phase": "rl", "step": 0, "eval/reward/mean": 0.25}
    assert after == {"phase": "rl", "step": 5, "eval/reward/mean": 1.0, "time/eval": 1.5}
    assert [evaluated_step(before), evaluated_step(after)] == [0, 5]
    assert not any(name.startswith("eval/") for name in step)


def test_status_and_console_are_told_as_in_local_mode(context: Stage) -> None:
    seen: list[Any] = []

    class Watching(Reporter):
        def phase(self, name: str, total: int, done: int = 0) -> None:
            seen.append((name, total, done))

        def step(self, phase: str, step: int, metrics: Any) -> None:
            seen.append((phase, step, metrics["reward/mean"]))

    chronicle = context.chronicle(Watching())
    chronicle.begin(4, 0)
    context.play(1, [ones(1.0, 0.0)])
    context.told(1, **STEP)
    chronicle.follow()
    assert seen == [("rl", 4, 0), ("rl", 1, 0.5)]
    chronicle.writer.write_status("finished")
    status = json.loads((context.run / "status.json").read_text())
    assert (status["state"], status["step"], status["steps"]) == ("finished", 1, 4)
    assert status["eta_seconds"] == pytest.approx(9.0)


def test_a_resumed_run_drops_what_came_after_its_checkpoint(context: Stage) -> None:
    chronicle = context.chronicle()
    chronicle.begin(9, 0)
    for step in (1, 2, 3):
        context.play(step, [ones(1.0, 0.0)])
        context.told(step, **STEP)
    chronicle.follow()
    context.play(4, [ones(1.0, 0.0)])
    again = context.chronicle()
    again.begin(9, 2)
    assert {line["step"] for line in read_jsonl(context.run / "rollouts.jsonl")} == {1, 2}
    assert [line["step"] for line in read_jsonl(context.run / "metrics.jsonl")] == [1, 2]
    assert sorted(path.name for path in (context.run / "samples").iterdir()) == ["000001.npz", "000002.npz"]
    assert not context.log.exists() and not list((context.run / rollout_exchange.FOLDER).iterdir())
    context.play(3, [ones(0.0, 0.0)])
    context.told(3, **STEP | {"upshot/reward/mean": 0.0})
    again.follow()
    assert [line["reward/mean"] for line in read_jsonl(context.run / "metrics.jsonl")] == [0.5, 0.5, 0.0]


def test_steps_up_to_the_checkpoint_that_a_killed_launcher_did_not_write_are_written_at_the_resume(
    context: Stage,
) -> None:
    """Killed after step 1's line; step 2 was logged by verl, step 3 was saved and not logged any more."""
    chronicle = context.chronicle()
    chronicle.begin(9, 0)
    context.play(1, [ones(1.0, 0.0)])
    context.told(1, **STEP)
    chronicle.follow()
    for step in (2, 3, 4):
        context.play(step, [ones(1.0, 1.0)])
    context.told(2, **STEP)
    context.chronicle().begin(9, 3)
    lines = read_jsonl(context.run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert "train/grad_norm" in lines[1] and "train/grad_norm" not in lines[2]
    assert [line["step"] for line in read_jsonl(context.run / "rollouts.jsonl")] == [1, 1, 2, 2, 3, 3]


def test_the_report_and_the_tables_read_such_a_run(context: Stage) -> None:
    chronicle = context.chronicle()
    chronicle.begin(1, 0)
    context.play(1, [[Score(1.0), DOWN]])
    context.told(1, **STEP)
    chronicle.follow()
    chronicle.writer.write_status("finished")
    page = write_report(context.run).read_text()
    assert "a red lamp" in page and str(Reason.CONNECTION) in page
    run = runs.read(context.run)
    assert [reply["reward"] for reply in run.replies] == [1.0, None] and run.status["state"] == "finished"


def test_supervised_steps_have_local_modes_names(tmp_path: Path) -> None:
    context = Stage(tmp_path, "train.method=sft")
    chronicle = context.chronicle()
    chronicle.begin(2, 0)
    context.told(1, **{"train/loss": 2.5, "train/grad_norm": 1.0, "train/lr": 0.1})
    context.told(1, **{"val/loss": 2.25})
    chronicle.follow()
    step, look = read_jsonl(context.run / "metrics.jsonl")
    assert (step["phase"], step["loss/nll"], step["train/lr"]) == ("sft", 2.5, 0.1) and step["time/step"] >= 0
    assert look == {"phase": "sft", "step": 1, "eval/loss/nll": 2.25}
