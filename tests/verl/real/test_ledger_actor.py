"""Budget and limits over processes of Ray."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

from upshot.verl.process import run


def test_limits_hold_over_processes_and_the_dead_give_their_slots_back(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "RAY_USAGE_STATS_ENABLED": "0"}
    lines: list[str] = []
    code = run([sys.executable, "-m", "tests.verl.real.ledgers", str(tmp_path)], env, tmp_path / "log", lines.append)
    assert code == 0, "\n".join(lines[-40:])
    found = json.loads(next(line for line in lines if line.startswith("FOUND ")).removeprefix("FOUND "))
    assert found["answers"] == [True, True]
    assert (found["calls"], found["most"], found["most again"]) == (80, 4, 4)
    assert found["view"][1].startswith("2 workers, spent: ")  # as of the last reports
    assert found["after a death"] == ["answered"] * 3
    assert "an agent-loop worker (first) died" in found["stopped"]
    assert found["spent"]["calls"] >= 84
    assert "ledger" in found["without a ledger"] and "resume the run" in found["without a ledger"]
