"""A Ray of our own starts even if its agents take longer than the 15 seconds that a raylet waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import patience
from tests.support.verl_cpu.settings import ENVIRONMENT
from upshot.verl.launch import WAITS

ROOT = Path(__file__).parents[3]
SLOW = """
import sys, time
if any(word.endswith(("dashboard/agent.py", "runtime_env/agent/main.py")) for word in sys.orig_argv):
    time.sleep(25)
"""
"""Python runs it at the start of every process that finds it."""
START = """
import ray
from upshot.verl.adapters.ray_start import be_patient
be_patient()
ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"TOLD": "heard"}})
print(ray.get(ray.remote(lambda: __import__("os").environ["TOLD"]).remote()))
"""


def test_ray_waits_for_agents_that_are_slow(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    env = {**WAITS, **ENVIRONMENT, **os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", START], env=env, capture_output=True, text=True, timeout=patience(300), cwd=tmp_path
    )
    assert "heard" in done.stdout, done.stderr[-4000:]
