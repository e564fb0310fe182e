"""Whatever dies, the run ends with the reason, can be gone on with, and leaves no process and no segment behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

from tests.cluster.real.under_way import UnderWay, under_way

DRIVER = "upshot.cluster.adapters.main"


def a_step_saved(run: UnderWay) -> bool:
    return run.steps >= 1 and (run.folder / "checkpoints" / "latest_checkpointed_iteration.txt").is_file()


def kill(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_killed_agent_loop_worker_stops_the_run_with_the_reason(tmp_path: Path) -> None:
    with under_way(tmp_path / "run", "actor_rollout_ref.rollout.agent.num_workers=2") as run:
        run.until(lambda: a_step_saved(run))
        kill(run.named("ray::AgentLoopWorker")[:1])
        assert run.ended() == 2
        assert "an agent-loop worker" in run.words and "died" in run.words and "--resume" in run.words
        assert run.left() == []


def test_a_killed_server_replica_stops_the_run_with_the_reason(tmp_path: Path) -> None:
    with under_way(tmp_path / "run", ranks=2) as run:
        run.until(lambda: a_step_saved(run))
        kill(run.named(SERVER)[:1])
        assert run.ended() == 2
        assert "died" in run.words and "--resume" in run.words
        assert run.left() == []


SERVER = "ray::Server"


def test_ctrl_c_ends_the_run_and_closes_the_helpers(tmp_path: Path) -> None:
    with under_way(tmp_path / "run") as run:
        run.until(lambda: a_step_saved(run))
        run.process.send_signal(signal.SIGINT)
        assert run.ended() == 130
        assert "could not be closed" not in run.log and "did not close" not in run.log
        assert run.left() == []


@pytest.mark.parametrize("whom", ["the driver", "the command itself"])
def test_after_kill_9_nothing_is_left(tmp_path: Path, whom: str) -> None:
    with under_way(tmp_path / "run") as run:
        run.until(lambda: a_step_saved(run))
        kill([run.process.pid] if whom == "the command itself" else run.named(DRIVER)[:1])
        code = run.ended()
        assert code == (-signal.SIGKILL if whom == "the command itself" else 2)
        assert whom == "the command itself" or "ended with -9" in run.words
        assert run.left() == []
