"""A stage of a published table on verl, whose result the next stage uses: `upshot reproduce … --verl STAGE`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.verl.real.verl_run import ENV

LIMIT_S = 1800.0


def test_a_stage_is_trained_on_verl_and_the_next_one_evaluates_what_it_made(tmp_path: Path) -> None:
    words = ["reproduce", "gsm8k-multiturn", "--small", "--verl", "trained", "--out", str(tmp_path / "t")]
    command = [sys.executable, "-m", "tests.support.verl_cpu", *words]
    done = subprocess.run(command, env={**os.environ, **ENV}, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "t" / "trained" / "verl.txt").is_file(), "a run of verl"
    assert list(json.loads((tmp_path / "t" / "stages.json").read_text())) == [
        "small_model",
        "data",
        "trained",
        "evaluate",
    ]
    assert "| trained |" in (tmp_path / "t" / "table.md").read_text()
    again = subprocess.run(command, env={**os.environ, **ENV}, capture_output=True, text=True, timeout=LIMIT_S)
    assert again.stdout.count("done before") == 4
