"""Whatever dies, the run ends with the reason, can be resumed, and leaves no process and no shared-memory segment
behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

from tests.verl.real.judge import Judge
from tests.verl.real.under_way import UnderWay, under_way
from tests.verl.real.verl_run import SMALL, verl_run

DRIVER = "upshot.verl.adapters.main"
SERVER = "ray::RankServer"
TWO_WORKERS = "actor_rollout_ref.rollout.agent.num_workers=2"


def a_step_saved(run: UnderWay) -> bool:
    return run.steps >= 1 and (run.folder / "checkpoints" / "latest_checkpointed_iteration.txt").is_file()


def kill(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_killed_agent_loop_worker_stops_the_run_with_the_reason(tmp_path: Path) -> None:
    with under_way(tmp_path / "run", TWO_WORKERS) as run:
        run.until(lambda: a_step_saved(run))
        kill(run.named("ray::AgentLoopWorker")[:1])
        assert run.ended() == 2
        # Said by the driver, which looks for dead workers, or by verl, which may notice one first.
        assert "agent-loop worker" in run.words or "AgentLoopWorker" in run.words
        assert "died" in run.words and "--resume" in run.words
        assert run.left() == []


def test_a_killed_server_replica_stops_the_run_with_the_reason(tmp_path: Path) -> None:
    with under_way(tmp_path / "run", ranks=2) as run:
        run.until(lambda: a_step_saved(run))
        kill(run.named(SERVER)[:1])
        assert run.ended() == 2
        assert "died" in run.words and "--resume" in run.words
        assert run.left() == []


@pytest.mark.parametrize("whom", ["the driver", "the command itself"])
def test_after_kill_9_nothing_is_left(tmp_path: Path, whom: str) -> None:
    with under_way(tmp_path / "run") as run:
        run.until(lambda: run.named("ray::AgentLoopWorker"))
        kill([run.process.pid] if whom == "the command itself" else run.named(DRIVER)[:1])
        code = run.ended()
        assert code == (-signal.SIGKILL if whom == "the command itself" else 2)
        assert whom == "the command itself" or "ended with -9" in run.words
        assert run.left() == []


def test_a_judge_that_is_down_is_awaited_and_ctrl_c_ends_the_run_with_its_helpers_closed(tmp_path: Path) -> None:
    with Judge(tmp_path, retries=12, backoff_s=0.5) as judge, under_way(tmp_path / "run", *judge.words) as run:
        run.until(lambda: run.steps >= 1)
        judge.down()
        run.until(lambda: "retried or failed: connection" in run.log)
        before = run.steps
        judge.up()
        run.until(lambda: run.steps >= before + 2)
        run.process.send_signal(signal.SIGINT)
        assert run.ended() == 130
        assert "could not be closed" not in run.log and "did not close" not in run.log
        assert run.left() == []


def test_a_judge_that_stays_down_stops_the_run_with_the_reason(tmp_path: Path) -> None:
    with Judge(tmp_path, retries=1, backoff_s=0.1) as judge, under_way(tmp_path / "run", *judge.words) as run:
        run.until(lambda: run.steps >= 1)
        judge.down()
        assert run.ended() == 2
        assert "missing" in run.words and "connection" in run.words
        assert run.left() == []


def test_budget_and_limits_hold_over_all_workers_and_an_empty_budget_stops_the_run(tmp_path: Path) -> None:
    words = (TWO_WORKERS, "budget.max_calls=100")
    with Judge(tmp_path, concurrency=3) as judge, under_way(tmp_path / "run", *judge.words, *words) as run:
        run.until(lambda: run.steps >= 1)
        assert run.ended() == 2
        assert "the budget of 100 calls is used up (100)" in run.words and "raise budget.max_calls" in run.words
        tally = judge.tally()  # every endpoint is tried once before the start; a worker has its whole share of 3
        assert tally["calls"] == 1 + 100 and tally["most"] == 2
        assert (run.folder / "spent.json").read_text().startswith('{"calls": 100')
        assert run.left() == []


def test_too_much_missing_stops_the_run_with_the_reasons(tmp_path: Path) -> None:
    told = (*SMALL, "train.steps=1", "eval.every=0", "reward.overlong.rule=missing", "episode.max_tokens=2")
    run = verl_run(tmp_path / "run", *told, ranks=1, check=False)
    assert run.code != 0 and "overlong" in run.said and "reward.max_missing" in run.said
