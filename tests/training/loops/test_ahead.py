"""Steps played ahead of the learner: scheduled instead of racing, as stale as the recipe says, exact after a kill."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import patience
from tests.training.helpers import CopyState
from tests.training.workshop import TINY, assert_same_steps, metrics, recipe
from upshot.config.recipe import Recipe
from upshot.run.console import Reporter
from upshot.run.folder import RunFolder
from upshot.run.run import TrainingRun, train
from upshot.training.learner.learner import Learner
from upshot.training.loops import rl
from upshot.training.snapshots import in_thread, states_at_once

HELPED = {
    "models": {"user": "scripted:tests.training.helpers:customer"},
    "futures": {"samples": 1, "rounds": 1, "user": {"name": "llm", "model": "user"}},
    "eval": {"every": 2, "rows": 2},
}
RUNS: dict[str, dict[str, Any]] = {
    "rl": {"async_steps": 1, "kl": 0.1, "minibatches": 2, "more": HELPED},
    "rl by two": {"async_steps": 2},
    "rl with adapters": {"async_steps": 1, "more": {"model": {**TINY, "lora": {"r": 2}}}},
    "online-dpo": {"async_steps": 1, "method": "online-dpo", "group_size": 3},
    "ppo": {"async_steps": 1, "method": "ppo", "kl": 0.05},
}


class Killed(Exception):
    """The exception with which the tests stop a run."""


class Kills(Reporter):
    """Ends the run after a given step was written, with nothing saved."""

    def __init__(self, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.monkeypatch = step, monkeypatch

    def step(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """Like kill -9."""
        if step == self.at:
            self.monkeypatch.setattr(TrainingRun, "checkpoint", lambda *_: None)
            raise Killed


def made(folder: Path, **train_: Any) -> Recipe:
    """A run in which every step learns something."""
    reward = {"reward": {"metrics": [{"name": "tests.training.helpers:Lottery"}]}}
    return recipe(
        folder, **{"warm": False, "steps": 5, "group_size": 3, **train_, "more": reward | train_.get("more", {})}
    )


def resume(folder: Path, **update: Any) -> None:
    opened = RunFolder.open(folder)
    settings = opened.recipe
    train(settings.model_copy(update={"train": settings.train.model_copy(update=update)}), opened)


@pytest.mark.parametrize("name", RUNS)
def test_killed_and_resumed_a_run_played_ahead_equals_the_uninterrupted_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(made(tmp_path / "straight", **RUNS[name]))
    with monkeypatch.context() as killed, pytest.raises((Killed, BaseExceptionGroup)):
        train(made(tmp_path / "run", **RUNS[name]), reporter=Kills(3, killed))
    found = RunFolder.open(tmp_path / "run").latest()
    assert found is not None and found.step == 2
    resume(tmp_path / "run")
    assert_same_steps(metrics(tmp_path / "run"), metrics(tmp_path / "straight"))
    rollouts = [(tmp_path / run / "rollouts.jsonl").read_bytes() for run in ("run", "straight")]
    assert rollouts[0] == rollouts[1]


def test_a_finished_run_played_ahead_can_be_extended_without_a_difference(tmp_path: Path) -> None:
    train(made(tmp_path / "straight", steps=4, async_steps=2))
    train(made(tmp_path / "run", steps=2, async_steps=2))
    resume(tmp_path / "run", steps=4)
    assert_same_steps(metrics(tmp_path / "run"), metrics(tmp_path / "straight"))


@pytest.mark.parametrize("ahead", [1, 2])
def test_replies_are_stale_by_exactly_the_set_number_of_steps(ahead: int, tmp_path: Path) -> None:
    train(made(tmp_path / "run", async_steps=ahead))
    lines = metrics(tmp_path / "run")
    expected = [min(step, ahead) for step in range(5)]
    assert [line["policy/staleness"] for line in lines] == expected
    assert [line["policy/staleness_max"] for line in lines] == expected


def test_the_log_probabilities_of_stale_replies_are_those_of_their_sampler(tmp_path: Path) -> None:
    """Learned with the weights that sampled them, the ratio is one; with later weights it is not."""
    train(made(tmp_path / "fresh", lr=1e-2))
    train(made(tmp_path / "stale", lr=1e-2, async_steps=1))
    fresh, stale = ([line["policy/kl_to_sampler"] for line in metrics(tmp_path / run)] for run in ("fresh", "stale"))
    assert max(fresh) < 1e-9
    assert stale[0] < 1e-9 < min(stale[1:])


def test_with_none_ahead_a_run_is_strictly_on_policy_and_uses_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    learn = rl.learn

    def look(*args: Any) -> dict[str, float]:
        threads.add(threading.current_thread() is threading.main_thread())
        return learn(*args)

    monkeypatch.setattr(rl, "learn", look)
    train(made(tmp_path / "run", steps=2))
    assert threads == {True} and "policy/staleness" not in metrics(tmp_path / "run")[0]
    train(made(tmp_path / "ahead", steps=2, async_steps=1))
    assert threads == {True, False}


def test_the_next_step_is_played_while_this_one_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner waits for replies of the step after its own: without overlap it would wait forever."""
    played = threading.Event()
    play, forward = rl.play, Learner.forward_backward

    async def playing(recipe: Recipe, context: Any, rows: Any, step: int, **more: Any) -> Any:
        groups = await play(recipe, context, rows, step, **more)
        if step == 1:
            played.set()
        return groups

    def learning(self: Learner, *args: Any) -> dict[str, float]:
        assert played.wait(patience(60)), "step 1 was not played while step 0 was learned"
        return forward(self, *args)

    monkeypatch.setattr(rl, "play", playing)
    monkeypatch.setattr(Learner, "forward_backward", learning)
    train(made(tmp_path / "run", steps=2, async_steps=1))


def test_a_cancellation_waits_for_the_thread_and_is_raised_afterwards() -> None:
    begun, go_on = threading.Event(), threading.Event()
    done = []

    def work() -> str:
        begun.set()
        assert go_on.wait(patience(60))
        return "learned"

    async def step() -> None:
        done.append(await in_thread(work))
        done.append("written")
        await asyncio.sleep(0)
        done.append("too far")

    async def main() -> None:
        task = asyncio.create_task(step())
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert done == ["learned", "written"]


def judged_by(when: str) -> dict[str, Any]:
    return {
        "models": {"judge": f"policy@{when}"},
        "reward": {"metrics": [{"name": "tests.training.helpers:CopyState"}]},
    }


def states(folder: Path) -> list[int]:
    """Which state of the copy judged each step; there is only one per step."""
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    found: dict[int, set[int]] = {}
    for row in rows:
        found.setdefault(row["step"], set()).add(int(row["reward"]["total"]["value"]))
    assert all(len(own) == 1 for own in found.values()), found
    return [own.pop() for _, own in sorted(found.items())]


def of_steps(folder: Path) -> list[dict[str, Any]]:
    """The metrics without helpers' counters, which include calls of steps in progress."""
    return [{key: value for key, value in line.items() if not key.startswith("model/")} for line in metrics(folder)]


@given(st.integers(0, 7), st.integers(1, 7))
def test_a_state_that_a_step_in_progress_needs_is_not_overwritten_and_no_copy_is_idle(ahead: int, every: int) -> None:
    def is_safe(copies: int) -> bool:
        held = dict.fromkeys(range(copies), 0)
        for step in range(60):
            if step and step % every == 0:  # before it is learned, while later ones are in progress
                held[step // every % copies] = step // every
            needed = {max(later - ahead, 0) // every for later in range(step + 1, step + ahead + 1)}
            if any(held[state % copies] != state for state in needed):
                return False
        return True

    found = states_at_once(every, ahead)
    assert is_safe(found) and (found == 1 or not is_safe(found - 1))


@pytest.mark.parametrize(("ahead", "every"), [(0, 2), (1, 1), (2, 1), (2, 2), (3, 2)])
def test_a_judge_that_is_a_copy_is_renewed_by_schedule_and_not_by_timing(
    ahead: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run is fast and never stopped; the other has a judge that is slow at random, and is killed and resumed."""
    settings: dict[str, Any] = {"async_steps": ahead, "prompts_per_step": 2, "more": judged_by(str(every)), "steps": 7}
    train(made(tmp_path / "straight", **settings))
    monkeypatch.setattr(CopyState, "slow", lambda seed: seed % 7 / 100)
    with monkeypatch.context() as killed, pytest.raises((Killed, BaseExceptionGroup)):
        train(made(tmp_path / "run", **settings), reporter=Kills(5, killed))
    resume(tmp_path / "run")
    assert (tmp_path / "run" / "rollouts.jsonl").read_bytes() == (tmp_path / "straight" / "rollouts.jsonl").read_bytes()
    assert_same_steps(of_steps(tmp_path / "run"), of_steps(tmp_path / "straight"))
    assert states(tmp_path / "straight") == [max(step - ahead, 0) // every * every for step in range(7)]
