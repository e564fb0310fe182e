"""Long runs: checkpoints are saved in the background, the best is kept, runs stop early, finished work survives."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.patience import patience
from tests.training.workshop import datum, learner, metrics, recipe
from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.errors import UserError
from upshot.run.checkpoints import Checkpoints
from upshot.run.console import PlainReporter, Reporter
from upshot.run.folder import RunFolder
from upshot.run.resume import resumed_recipe
from upshot.run.run import train
from upshot.run.writer import Saver
from upshot.training.learner.learner import Learner
from upshot.training.loops import rl
from upshot.training.loops.dpo import Dpo, dpo_loss
from upshot.training.loops.sft import Sft, sft_loss
from upshot.training.metrics.alarms import WINDOW, Alarms
from upshot.training.metrics.best import BestTracker

LOTTERY = {"reward": {"metrics": [{"name": "tests.training.helpers:Lottery"}]}}


def made(folder: Path, **train_: Any) -> Recipe:
    """A run in which every step learns something."""
    return recipe(folder, **{"warm": False, "steps": 4, **train_, "more": LOTTERY | train_.get("more", {})})


def resume(folder: Path, *overrides: str, reporter: Reporter | None = None) -> None:
    opened = RunFolder.open(folder)
    train(resumed_recipe(opened, overrides), opened, reporter)


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return found


class Told(Reporter):
    """Records what was printed, and acts after each step."""

    def __init__(self, after: Callable[[int], object] = lambda step: None) -> None:
        self.after = after
        self.said: list[str] = []

    def step(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """Called after a step is written."""
        self.after(step)

    def say(self, text: str) -> None:
        """A printed line."""
        self.said.append(text)


# --- checkpoints


def test_training_goes_on_while_a_checkpoint_is_written_and_it_is_of_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(made(tmp_path / "short", steps=1))
    later, save = threading.Event(), Checkpoints.save

    def slow(self: Checkpoints, phase: str, step: int, *rest: Any) -> Path:
        assert step != 1 or later.wait(patience(60)), "step 2 waited for the checkpoint of step 1"
        return save(self, phase, step, *rest)

    monkeypatch.setattr(Checkpoints, "save", slow)
    train(made(tmp_path / "run", steps=2, save={"every": 1}), reporter=Told(lambda step: step == 2 and later.set()))
    own, short = (tmp_path / run / "checkpoints" / "rl-000001" for run in ("run", "short"))
    weights, expected = (load_file(folder / "model.safetensors") for folder in (own, short))
    assert all(torch.equal(weights[name], expected[name]) for name in expected) and weights.keys() == expected.keys()
    states = [torch.load(folder / "learner.pt", weights_only=True)["optimizer"]["adam"] for folder in (own, short)]
    assert torch.equal(states[0][0]["exp_avg"], states[1][0]["exp_avg"])


def test_an_error_in_the_background_is_raised_by_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Checkpoints.save

    def fails(self: Checkpoints, phase: str, step: int, *rest: Any) -> Path:
        if step == 2:
            raise UserError("cannot write checkpoint 2")
        return save(self, phase, step, *rest)

    monkeypatch.setattr(Checkpoints, "save", fails)
    with pytest.raises((UserError, BaseExceptionGroup)):
        train(made(tmp_path / "run", steps=50, save={"every": 2}))
    assert "cannot write checkpoint 2" in status(tmp_path / "run")["reason"]
    found = RunFolder.open(tmp_path / "run").latest()
    assert found is not None and found.step == metrics(tmp_path / "run")[-1]["step"], "what was reached is saved"


def test_a_checkpoint_is_due_by_steps_or_by_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("upshot.run.writer.time.monotonic", lambda: now)
    saver = Saver(Checkpoints(tmp_path))
    config = TrainConfig(steps=100, save={"every": 10, "minutes": 2})
    assert [step for step in range(1, 100) if saver.due(step, config)] == list(range(10, 100, 10))
    now = 121.0
    assert saver.due(3, config) and not saver.due(100, config), "the end saves by itself"
    saver.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_disk_that_is_full_when_the_tokenizer_is_saved_is_one_clear_error(tmp_path: Path) -> None:
    """Its library raises a plain Exception."""
    tokenizer = Tokenizer(WordLevel({"word": 0}, unk_token="word"))
    with pytest.raises(UserError, match=r"cannot write checkpoint .*No space left on device.*--resume"):
        Checkpoints(tmp_path).save("rl", 1, 3, lambda folder: tokenizer.save("/dev/full"))


def test_a_half_written_checkpoint_is_ignored(tmp_path: Path) -> None:
    train(made(tmp_path / "straight"))
    train(made(tmp_path / "run", steps=2))
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in (".partial-rl-000003", "rl-000003"):  # killed while writing; a name without its last file
        (checkpoints / name).mkdir()
        (checkpoints / name / "model.safetensors").write_bytes(b"half")
    resume(tmp_path / "run", "train.steps=4")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")
    assert not list(checkpoints.glob(".partial*"))


# --- evaluations


def looks(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Evaluations that give these rewards, in order."""
    left: Iterator[float] = iter(values)

    async def look(*_: Any) -> dict[str, float]:
        return {"reward/mean": next(left)}

    monkeypatch.setattr(rl, "play_held_out", look)


EVALUATED = {"more": {"eval": {"every": 1}}}


def test_the_best_checkpoint_by_a_metric_stays_beside_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks(monkeypatch, [0.1, 0.9, 0.3, 0.2, 0.4])
    train(made(tmp_path / "run", save={"keep": 1, "every": 1, "best": "eval/reward/mean"}, **EVALUATED))
    checkpoints = Checkpoints(tmp_path / "run")
    assert [found.step for found in checkpoints.saved()] == [1, 4]
    best = json.loads((checkpoints.path / "best.json").read_text())
    assert best == {"checkpoint": "rl-000001", "metric": "eval/reward/mean", "value": 0.9}
    lines = metrics(tmp_path / "run")
    assert lines[1]["eval/reward/mean"] == 0.9, "a line has the evaluation of the model before its update"


def test_training_ends_after_enough_evaluations_without_a_new_best_and_stays_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"eval": {"every": 1, "stop_after": 2}}
    looks(monkeypatch, [0.5, 0.6, 0.6, 0.1, 0.7, 0.8])
    told = Told()
    train(made(tmp_path / "run", steps=9, more=more), reporter=told)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 3]
    assert status(tmp_path / "run")["state"] == "finished" and "without a new best" in told.said[-1]
    before = metrics(tmp_path / "run")
    resume(tmp_path / "run")
    assert metrics(tmp_path / "run") == before
    resume(tmp_path / "run", "eval.stop_after=0", "train.steps=4")
    assert metrics(tmp_path / "run")[-1]["step"] == 4, "and goes on when it is told to"


def test_the_smallest_loss_is_the_best_and_the_direction_can_be_set() -> None:
    for metric, values, since in (
        ("eval/loss/nll", [3.0, 2.0, 2.5], 1),
        ("eval/reward/mean", [3.0, 2.0, 2.5], 2),
        ("min eval/reward/mean", [3.0, 2.0, 2.5], 1),
    ):
        record = BestTracker(metric)
        for step, value in enumerate(values):
            record.add(step, {record.metric: value})
        assert record.since_best() == since


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"save": {"best": "reward/mean"}, **EVALUATED}, "name a metric of the evaluations"),
        ({"save": {"best": "eval/reward/mean"}}, "set eval.every"),
        ({"save": {"best": "eval/nosuch"}, **EVALUATED}, "no evaluation of rl has it; the names begin with eval/rewa"),
        (
            {"save": {"best": "eval/metric/verifer"}, **EVALUATED},
            "which is not among reward.metrics; did you mean 'eval/metric/Lo",
        ),
        ({"more": {"eval": {"stop_after": 2}}}, "set eval.every"),
        ({"method": "dpo", **EVALUATED}, "set eval.data"),
        ({"more": {"eval": {"every": 1, "samples": 4}}}, "all replies are the same"),
    ],
)
def test_useless_evaluation_settings_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        train(made(tmp_path / "run", **change))


def test_a_best_metric_that_is_never_logged_is_refused_but_missing_scores_are_not() -> None:
    tracker = BestTracker("eval/metric/nosuch")
    with pytest.raises(
        UserError, match=r"train\.save\.best: the evaluation has no 'eval/metric/nosuch'; known: eval/re"
    ):
        tracker.check_known({"eval/reward/mean": 1.0})
    tracker.check_known({"eval/reward/mean": 1.0, "eval/missing/timeout": 2.0})
    tracker.check_known({"eval/reward/missing": 2.0})


def test_several_samples_a_row_give_pass_at_k_on_any_split(tmp_path: Path) -> None:
    more = {"eval": {"every": 2, "rows": 3, "samples": 4, "temperature": 1.0, "split": "test"}}
    train(made(tmp_path / "run", steps=2, more=more))
    last = metrics(tmp_path / "run")[-1]
    assert {"eval/task/pass@1", "eval/task/pass@2", "eval/task/pass@4", "eval/reward/mean"} <= last.keys()
    with pytest.raises((UserError, BaseExceptionGroup)):
        train(made(tmp_path / "none", steps=2, more={"eval": {"every": 2, "split": "nowhere"}}))


def test_the_validation_loss_is_the_training_loss_of_held_out_examples() -> None:
    data = [datum(9, 1), datum(6, 2), datum(12, 3)]
    student = learner(method="sft")
    expected = student.forward_backward([[d] for d in data], Sft())
    assert sft_loss(student, data)["loss/nll"] == pytest.approx(expected["loss/nll"], rel=1e-5)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_the_validation_loss_of_pairs_is_their_training_loss(kind: str) -> None:
    student = learner(method="dpo", dpo={"beta": 0.3, "loss": kind})
    student.keep_reference()
    with torch.no_grad():
        for weight in student.parameters:
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    pairs = [(datum(9, 1), datum(7, 2)), (datum(8, 3), datum(9, 4))]
    for one, reference in zip(
        [d for p in pairs for d in p], student.logprobs([d for p in pairs for d in p], True), strict=True
    ):
        one.reference = reference
    expected = student.forward_backward(pairs, Dpo(student.config))
    found = dpo_loss(student, pairs)
    assert found == pytest.approx({key: expected[key] for key in found}, rel=1e-4)


def test_sft_and_dpo_are_evaluated_on_examples_of_their_own_and_keep_the_best(tmp_path: Path) -> None:
    more = {"eval": {"every": 2, "rows": 8}}
    train(
        recipe(tmp_path / "sft", method="sft", warm=False, steps=6, lr=3e-3, save={"best": "eval/loss/nll"}, more=more)
    )
    losses = [line["eval/loss/nll"] for line in metrics(tmp_path / "sft") if "eval/loss/nll" in line]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    assert json.loads((tmp_path / "sft/checkpoints/best.json").read_text())["checkpoint"] == "sft-000006"
    pair = {"prompt": "i want a lamp", "chosen": "which size ?", "rejected": "here is a red lamp"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    dpo: dict[str, Any] = {"method": "dpo", "warm": False, "steps": 3, "data": str(tmp_path / "pairs.jsonl")}
    with pytest.raises(UserError, match=r"set eval\.data"):
        train(recipe(tmp_path / "none", **dpo, more=more))
    more = {"eval": {"every": 2, "data": str(tmp_path / "pairs.jsonl")}}
    train(recipe(tmp_path / "dpo", **dpo, more=more))
    found = [line["eval/loss/dpo"] for line in metrics(tmp_path / "dpo") if "eval/loss/dpo" in line]
    assert found[0] == pytest.approx(math.log(2)) and found[-1] < found[0]


def test_dpo_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    pair = {"prompt": "i want a lamp", "chosen": "which size ?", "rejected": "here is a red lamp"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    settings: dict[str, Any] = {"method": "dpo", "warm": False, "data": str(tmp_path / "pairs.jsonl")}
    settings["more"] = {"eval": {"every": 2, "data": str(tmp_path / "pairs.jsonl")}}
    train(recipe(tmp_path / "straight", steps=4, **settings))
    train(recipe(tmp_path / "run", steps=2, **settings))
    metrics_file = tmp_path / "run" / "metrics.jsonl"
    metrics_file.write_text(
        "".join(metrics_file.read_text().splitlines(True)[:-1]), "utf-8"
    )  # the evaluation after step 2
    resume(tmp_path / "run", "train.steps=4")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")


# --- what goes wrong


def test_a_reward_that_is_not_a_number_is_missing_and_never_zero(tmp_path: Path) -> None:
    more = {"reward": {"metrics": [{"name": "tests.training.helpers:Sometimes"}], "max_missing": 0.9}}
    train(recipe(tmp_path / "run", warm=False, steps=2, more=more))
    for line in metrics(tmp_path / "run"):
        assert line["missing/not_a_score"] > 0 and line["reward/missing"] > 0
        assert line["reward/mean"] == 1.0, "the mean of those that have one"
        assert math.isfinite(line.get("train/grad_norm", 0.0))


def diverges(monkeypatch: pytest.MonkeyPatch, after: int, then: Callable[[Learner], dict[str, float]]) -> None:
    """Learning that diverges after this many steps."""
    learn = rl.learn

    def wrong(student: Learner, *rest: Any) -> dict[str, float]:
        logs = learn(student, *rest)
        return logs | then(student) if student.steps > after else logs

    monkeypatch.setattr(rl, "learn", wrong)


def test_after_steps_without_a_finite_loss_the_run_stops_and_names_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(made(tmp_path / "straight"))
    with monkeypatch.context() as broken:
        diverges(broken, 2, lambda _: {"loss/policy": math.nan, "train/skipped": 1.0})
        with pytest.raises((UserError, BaseExceptionGroup)) as raised:
            train(made(tmp_path / "run", steps=50, save={"every": 1}), reporter=PlainReporter())
    text = str(raised.value) + str(status(tmp_path / "run"))
    assert "loss/policy is nan" in text and "rl-000002" in text and "train.max_skipped" in text
    assert [line["step"] for line in metrics(tmp_path / "run")][-1] == 5
    assert "step 3: loss/policy is nan; nothing was learned in this step" in capsys.readouterr().out
    found = RunFolder.open(tmp_path / "run").latest()
    assert found is not None and found.step == 2, "no bad step was saved"
    resume(tmp_path / "run", "train.steps=4")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")


def test_weights_that_are_not_finite_are_not_saved_and_the_last_good_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ruin(student: Learner) -> dict[str, float]:
        student.parameters[0].data.fill_(math.nan)
        return {}

    diverges(monkeypatch, 2, ruin)
    told = Told()
    with pytest.raises((UserError, BaseExceptionGroup)) as raised:
        train(made(tmp_path / "run", save={"every": 1}), reporter=told)
    text = str(raised.value) + str(status(tmp_path / "run"))
    assert "weights are not finite after step 3" in text and "rl-000002" in text
    assert [found.step for found in Checkpoints(tmp_path / "run").saved()] == [1, 2]


def test_alarms_say_once_what_is_wrong_and_what_to_do() -> None:
    alarms = Alarms()
    fine = {"policy/entropy": 2.0, "rollout/reply_tokens": 100.0, "reward/flat_groups": 0.1, "rollout/cut": 0.0}
    fine["rollout/thought_tokens"] = 50.0
    assert not any(alarms.watch(fine) for _ in range(3 * WINDOW))
    ill = {"policy/entropy": 0.01, "rollout/reply_tokens": 3.0, "reward/flat_groups": 1.0, "rollout/cut": 0.9}
    assert not [text for _ in range(3 * WINDOW) for text in alarms.watch({"eval/reward/mean": 0.1})], "no step at all"
    said = [text for _ in range(3 * WINDOW) for text in alarms.watch(ill)]  # and it has no thoughts either
    assert len(said) == 5 == len(alarms.ringing)
    for word in (
        "entropy fell from 2",
        "replies shrank",
        "stops thinking",
        "episode.max_tokens",
        "all replies earn the",
    ):
        assert any(word in text for text in said), word
    assert not [text for _ in range(3 * WINDOW) for text in alarms.watch(fine)] and not alarms.ringing


def test_a_run_whose_groups_are_flat_reports_it_also_in_its_status(tmp_path: Path) -> None:
    more = {"reward": {"metrics": [{"name": "tests.training.helpers:Odd"}]}}
    told = Told()
    train(recipe(tmp_path / "run", warm=False, steps=WINDOW, save={"every": 0}, more=more), reporter=told)
    assert any(f"step {WINDOW}: in 100% of the groups" in text for text in told.said)
    assert "group_size" in status(tmp_path / "run")["alarms"][0]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("where", ["play", "learn"])
def test_sigterm_in_a_step_saves_what_is_finished_and_the_run_resumes_exactly(
    where: str, ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(made(tmp_path / "straight", async_steps=ahead))
    count, work = 0, getattr(rl, where)

    def terminated(*args: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:  # step 3; if played ahead, while step 2 is learned
            os.kill(os.getpid(), signal.SIGTERM)
        return work(*args, **named)

    with monkeypatch.context() as killed:
        killed.setattr(rl, where, terminated)
        with pytest.raises(SystemExit) as raised:
            train(made(tmp_path / "run", save={"every": 0}, async_steps=ahead))
    assert raised.value.code == 143
    found = RunFolder.open(tmp_path / "run").latest()
    assert found is not None and found.step == metrics(tmp_path / "run")[-1]["step"] == (3 if where == "learn" else 2)
    assert status(tmp_path / "run")["state"] == "stopped"
    resume(tmp_path / "run", "train.save.every=2")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")


def test_the_status_shows_phase_step_process_time_left_and_the_last_numbers(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    run = tmp_path / "run"
    train(made(run, steps=2), reporter=Told(lambda step: seen.append(status(run))))
    assert (seen[0]["state"], seen[0]["pid"], seen[0]["phase"], seen[0]["steps"]) == ("running", os.getpid(), "rl", 2)
    last = status(run)
    assert (last["state"], last["step"], last["eta_seconds"]) == ("finished", 2, 0)
    assert last["metrics"]["reward/mean"] == metrics(run)[-1]["reward/mean"] and last["seconds"] > 0


def test_a_step_logs_where_its_time_went(tmp_path: Path) -> None:
    train(made(tmp_path / "run", steps=2, save={"every": 1}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    parts = {"sample", "futures", "judges", "rollout", "learn", "save", "step", "sampled_per_s", "learned_per_s"}
    assert {f"time/{part}" for part in (*parts, "memory_gib", "dollars")} <= lines[1].keys()
    line = lines[1]
    played = line["time/sample"] + line["time/futures"] + line["time/judges"]
    assert 0 < played <= line["time/rollout"] * 1.0001, "the parts add up to no more than the whole"
    assert line["time/rollout"] + line["time/learn"] <= line["time/step"] * 1.0001
