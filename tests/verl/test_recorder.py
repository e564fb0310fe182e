"""A run on verl writes its run folder like local mode: rollouts, lines, evaluations, status."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.run.report.test_report import embedded, replies_of
from upshot.config.load import load_recipe
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import Recipe
from upshot.core.conversation import Conversation, Message, Row, Sample, Turn
from upshot.core.files import read_jsonl
from upshot.core.score import Reason, Score
from upshot.models.tiny import tiny_tokenizer
from upshot.rewards.advantages.grouped import estimator
from upshot.rewards.credit import MAIN, Credit, Reward, Span
from upshot.rollout.reply import Rollout
from upshot.run import folder as runs
from upshot.run.console import Reporter
from upshot.run.folder import RunFolder
from upshot.run.report.report import write_report
from upshot.tasks.slots import SlotsTask
from upshot.training.loops.rl import set_advantages
from upshot.training.metrics.best import evaluated_step
from upshot.verl.checks.watchdog import MARK
from upshot.verl.recorder import COUNTERS, RunEcho, StepRecorder
from upshot.verl.worker import RolloutWorker

TASK = SlotsTask(rows_per_split=64)
STEP = {"train/grad_norm": 2.0, "reward/mean": 0.5, "time/step": 3.0}
SPENT = {"calls": 7.0, "tokens": 9.0, "dollars": 0.25}
DOWN = Score.missing(Reason.CONNECTION, "the server is down")


def reply_to(row: Row, total: Score, group: int, session: int) -> Rollout:
    sample = Sample((5, 6, 7), (8, 9), (-0.5, -0.25), "stop")
    talk = Conversation(row, 7, f"{row.id}#{session}")
    talk.turns = (*talk.turns, Turn(Message("assistant", "a red lamp"), sample))
    credit = None if total.is_missing else Credit({MAIN: total}, (Span(3, 5, (MAIN,)),))
    return Rollout(talk, group, reward=Reward(total, means={"verifier": total}), credit=credit)


class Stage:
    """A run folder, and the trainer process that writes to it."""

    def __init__(self, tmp: Path) -> None:
        own = ["task.rows_per_split=64", "warm_start=null", f"model.path={tmp / 'model'}", f"run_dir={tmp / 'run'}"]
        self.recipe: Recipe = load_recipe("quickstart", ["credit.by=reply", *own]).recipe
        self.folder = RunFolder.create(self.recipe)
        self.run = self.folder.path
        self.rows = TASK.rows("train")

    def recorder(self, steps: int = 9, done: int = 0) -> StepRecorder:
        found = StepRecorder(self.recipe, self.folder, TASK, lambda ids: [str(token) for token in ids])
        found.begin(steps, done)
        return found

    def play(self, scores: list[list[Score]]) -> list[list[Rollout]]:
        groups = [
            [reply_to(self.rows[group], score, group, session) for session, score in enumerate(own)]
            for group, own in enumerate(scores)
        ]
        set_advantages(groups, estimator(self.recipe.train.advantage.name))
        return groups


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def ones(*values: float) -> list[Score]:
    return [Score(value) for value in values]


def test_a_step_has_its_replies_with_advantages_and_spending(stage: Stage) -> None:
    stage.recorder().write_step(1, STEP, stage.play([ones(1.0, 0.0), ones(1.0, 1.0)]), SPENT)
    lines = read_jsonl(stage.run / "rollouts.jsonl")
    assert [(line["step"], line["group"], line["key"]) for line in lines] == [
        (1, group, f"{stage.rows[group].id}#{session}") for group in (0, 1) for session in (0, 1)
    ]
    assert lines[0]["goal"] == stage.rows[0].goal and lines[0]["groups"]
    assert [line["credit"][0]["advantage"] for line in lines[2:]] == [0.0, 0.0]
    assert lines[0]["credit"][0]["advantage"] == -lines[1]["credit"][0]["advantage"] > 0
    assert (stage.run / "samples/000001.npz").is_file()
    assert stage.folder.spent() == SPENT
    assert read_jsonl(stage.run / "metrics.jsonl")[0]["time/dollars"] == 0.25


def test_a_missing_reply_is_kept_with_its_reason_and_not_in_the_statistics(stage: Stage) -> None:
    stage.recorder().write_step(1, STEP, stage.play([[Score(1.0), DOWN, Score(0.0)]]), SPENT)
    line = read_jsonl(stage.run / "rollouts.jsonl")[1]
    assert line["reward"]["total"]["missing"] == Reason.CONNECTION
    assert line["reward"]["total"]["detail"]["why"] == "the server is down"
    (told,) = read_jsonl(stage.run / "metrics.jsonl")
    assert line["credit"] == []
    assert (told["train/grad_norm"], told["time/step"], told["reward/mean"]) == (2.0, 3.0, 0.5)
    assert told["task/missing"] == 1.0 and any(name.startswith("by/opening=") for name in told)


def test_a_checkpoint_has_its_steps_line_and_the_time_to_save_is_in_the_next(stage: Stage) -> None:
    recorder, seen = stage.recorder(), []

    def save() -> None:
        seen.extend(line["step"] for line in read_jsonl(stage.run / "metrics.jsonl"))
        (stage.folder.checkpoints.path / "global_step_1").mkdir(parents=True)

    recorder.write_step(1, STEP, stage.play([ones(1.0, 0.0)]), SPENT)
    recorder.save(1, save)
    assert seen == [1], "whoever is killed while it saves finds the line of the step"
    assert json.loads((stage.folder.checkpoints.path / "global_step_1" / COUNTERS).read_text()) == {}
    recorder.write_step(2, STEP, [], SPENT)
    first, second = read_jsonl(stage.run / "metrics.jsonl")
    assert first["time/save"] == 0.0 < second["time/save"]


def test_an_evaluation_is_a_line_of_its_own_of_the_weights_after_its_step(stage: Stage) -> None:
    recorder = stage.recorder()
    recorder.write_evaluation(0, {"eval/reward/mean": 0.25})
    recorder.write_step(5, STEP, stage.play([ones(1.0, 0.0)]), SPENT)
    recorder.write_evaluation(5, {"eval/reward/mean": 1.0, "time/eval": 1.5})
    before, step, after = read_jsonl(stage.run / "metrics.jsonl")
    assert before == {"phase": "rl", "step": 0, "eval/reward/mean": 0.25}
    assert after == {"phase": "rl", "step": 5, "eval/reward/mean": 1.0, "time/eval": 1.5}
    assert [evaluated_step(before), evaluated_step(after)] == [0, 5]
    assert not any(name.startswith("eval/") for name in step)


def test_checkpoints_from_before_a_resume_count_among_those_that_are_kept(stage: Stage) -> None:
    """verl forgets them when it is restarted."""
    path = stage.folder.checkpoints.path

    def save(step: int) -> None:
        (path / f"global_step_{step}" / "actor").mkdir(parents=True)
        (path / f"global_step_{step}" / "actor" / "model_world_size_1_rank_0.pt").touch()
        (path / "latest_checkpointed_iteration.txt").write_text(str(step))

    keep = stage.recorder().keep
    for step in range(1, keep + 1):
        stage.recorder().save(step, partial(save, step))
    assert len(list(path.glob("global_step_*"))) == keep
    stage.recorder(done=keep).save(keep + 1, partial(save, keep + 1))
    found = {entry.name for entry in path.glob("global_step_*")}
    assert found == {f"global_step_{step}" for step in range(2, keep + 2)}


def counted(calls: int, retries: int = 0) -> dict[str, Any]:
    return {"model/judge": {"judge": {"calls": calls, "retries": {"timeout": retries}}}}


def test_helpers_of_all_workers_are_counted_together_and_across_a_resume(stage: Stage) -> None:
    """Under local mode's names: calls, retries, tokens, cost, what the simulated user did."""
    judge = ModelSpec(url="http://127.0.0.1:1/v1", model="m")
    recipe = stage.recipe.model_copy(update={"models": {"judge": judge}})
    services = RolloutWorker(recipe, tiny_tokenizer(TASK.vocabulary()), 256).services
    recorder, name = stage.recorder(), "model/judge/judge/calls"
    assert recorder.count({"a": (3, counted(5, 1)), "b": (4, counted(2))}, services)[name] == 7.0
    assert recorder.count({"a": (9, counted(6, 3)), "b": (4, counted(2))}, services)[name] == 8.0
    assert services.counters()["model/judge"]["judge"]["retries"] == {"timeout": 3}
    recorder.save(4, (stage.folder.checkpoints.path / "global_step_4").mkdir)
    assert stage.recorder(done=4).count({"c": (1, counted(10))}, services)[name] == 18.0


class Watching(Reporter):
    """Records what it is told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def step(self, phase: str, step: int, metrics: Any) -> None:
        self.seen.append((phase, step, metrics["reward/mean"]))

    def say(self, text: str) -> None:
        self.seen.append(text)


def test_each_step_is_reported_once_and_so_are_the_watchdogs_messages(stage: Stage) -> None:
    recorder, watching = stage.recorder(4), Watching()
    recorder.write_step(1, STEP, [], SPENT)
    echo = RunEcho(stage.folder, "rl", watching)
    echo.follow("a line of verl's")
    assert watching.seen == [], "what was there before is known"
    recorder.write_step(2, STEP, [], SPENT)
    with (stage.run / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "st')
    echo.follow()
    echo.follow(f"(main pid=7) {MARK}no step for 9 s")
    assert watching.seen == [("rl", 2, 0.5), f"{MARK}no step for 9 s"]
    with (stage.run / "metrics.jsonl").open("a") as file:
        file.write('ep": 3, "reward/mean": 0.75}\n')
    echo.follow()
    assert watching.seen[-1] == ("rl", 3, 0.75)


def test_status_report_and_tables_read_such_a_run(stage: Stage) -> None:
    recorder = stage.recorder(4)
    recorder.write_step(1, STEP, stage.play([[Score(1.0), DOWN]]), SPENT)
    recorder.writer.write_status("finished")
    status = json.loads((stage.run / "status.json").read_text())
    assert (status["state"], status["step"], status["steps"]) == ("finished", 1, 4)
    assert status["eta_seconds"] == pytest.approx(9.0)
    page = json.dumps(replies_of(embedded(write_report(stage.run))["runs"][0]))
    assert "a red lamp" in page and str(Reason.CONNECTION) in page
    run = runs.read(stage.run)
    assert [reply["reward"] for reply in run.replies] == [1.0, None] and run.status["state"] == "finished"
