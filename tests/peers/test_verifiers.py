"""The example environments in verifiers' own source on PyPI, unchanged. Run by `make test-peers`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
PYTHON = os.environ.get("UPSHOT_PEERS", sys.executable)
"""A Python with verifiers; its source is in `sdist` beside its `bin`."""
EXAMPLES = "tests/v1/fixtures"


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the environments."""
    found = sorted((Path(PYTHON).parent.parent / "sdist").glob("verifiers-*.tar.gz"))
    if not found:
        pytest.skip(f"no source of verifiers beside {PYTHON}; `make test-peers` has it")
    folder = tmp_path_factory.mktemp("verifiers")
    with tarfile.open(found[-1]) as source:
        source.extractall(folder, filter="data")
    return next(folder.glob(f"verifiers-*/{EXAMPLES}"))


def run(examples: Path, *words: str) -> str:
    """What one of their commands prints; the remaining packages come from our environment."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(examples)]), "HF_HUB_OFFLINE": "1"}
    lent = f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r}); "
    command = [
        PYTHON,
        "-c",
        f"{lent}import runpy, sys; runpy.run_module(sys.argv.pop(1), alter_sys=True, run_name='__main__')",
    ]
    done = subprocess.run([*command, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def play(examples: Path, env: str, **taskset: Any) -> list[dict[str, Any]]:
    played: list[dict[str, Any]] = json.loads(
        run(examples, "tests.peers.play_verifiers", env, json.dumps(taskset)).splitlines()[-1]
    )
    return played


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_reward_is_the_outcome(examples: Path) -> None:
    played = play(examples, "echo-v1", phrases=["", "no such words"])
    assert [one["worth"] for one in played] == [1.0, 1.0, 0.0, 0.0], (
        "anybody has said nothing; random words are not these"
    )
    assert all(one["turns"] == 1 for one in played)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_user_takes_turns_and_its_tools_are_served(examples: Path) -> None:
    for one in play(examples, "echo-user-sim-v1", phrases=["", "no such words"]):
        assert one["worth"] == 0.5 and one["roles"] == ["system", "user", "assistant", "user", "assistant"]
    for one in play(examples, "counter-tool-v1"):
        assert one["worth"] == 0.0 and one["turns"] == 1, one


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_trains(examples: Path, tmp_path: Path) -> None:
    small = [
        "model.tiny={hidden: 16, layers: 1, heads: 2, mlp: 32}",
        "task.rows=40",
        "eval.rows=2",
        f"run_dir={tmp_path}/run",
    ]
    quick = ["warm_start.steps=1", "train.steps=1", "train.prompts_per_step=2", "train.group_size=2"]
    run(examples, "upshot.cli", "train", "examples/reverse.yaml", *small, *quick)
    replies = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(replies) == 4 and all(0 <= reply["reward"]["total"]["value"] <= 1 for reply in replies)
