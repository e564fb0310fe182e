"""Runs the original CollabLLM against `upshot serve`, if its package can be downloaded."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def package(tmp_path: Path) -> str:
    """The folder of `collabllm`; its own requirements (vLLM, for one) are not needed here."""
    if importlib.util.find_spec("collabllm") is not None:
        return ""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "package")]
    got = subprocess.run([*pip, "collabllm"], capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"the package collabllm cannot be had: {got.stderr.strip().splitlines()[-1]}")
    return str(tmp_path / "package")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_originals_session_reward_builder_and_converters_run_against_upshot_serve(package: str) -> None:
    for needed in ("litellm", "datasets", "llguidance"):
        pytest.importorskip(needed)
    paths = os.pathsep.join(filter(None, [package, str(ROOT)]))
    command = [sys.executable, "-m", "tests.peers.collabllm_original"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["session", "reward", "builder", "converters"]
