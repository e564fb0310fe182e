"""The examples run: the whole loop inline, and its configured twin, for each of the three settings."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import upshot

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "model": {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32}},
    "task.size": 32,
    "warm_start": {"steps": 1, "batch": 4},
    "train": {"steps": 1, "prompts_per_step": 2, "group_size": 2},
}


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])
    monkeypatch.chdir(tmp_path)
    yield
    for name in set(sys.modules) - before:
        if (EXAMPLES / f"{name}.py").is_file():
            del sys.modules[name]


@pytest.mark.parametrize("name", ["collabllm", "task", "classmates"])
def test_the_whole_loop_runs_inline(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"{name}_loop")
    module.PROMPTS, module.GROUP = 2, 2
    means = asyncio.run(module.main(warm_steps=1, steps=2))
    assert len(means) == 2 and "step   2" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["collabllm", "task", "classmates"])
def test_the_whole_loop_fits_in_about_a_hundred_lines_and_names_nothing_private(name: str) -> None:
    text = (EXAMPLES / f"{name}_loop.py").read_text()
    assert len(text.splitlines()) <= 115
    assert "._" not in text and "import _" not in text


@pytest.mark.parametrize("name", ["collabllm", "task"])
def test_the_configured_twin_runs(name: str, tmp_path: Path) -> None:
    run = upshot.train(EXAMPLES / f"{name}.yaml", run_dir=str(tmp_path / "run"), **SMALL)
    assert run.status["state"] == "finished" and len(run.replies) == 4


def test_the_classmate_and_its_twin_run(tmp_path: Path) -> None:
    few = {key: SMALL[key] for key in ("model", "task.size")}
    train = {"steps": 1, "prompts_per_step": 2}
    peer = upshot.train(EXAMPLES / "classmate.yaml", run_dir=str(tmp_path / "peer"), train=train, **few)
    run = upshot.train(
        EXAMPLES / "classmates.yaml", run_dir=str(tmp_path / "run"), models={"peer": str(peer.checkpoint)},
        **SMALL, **{"reward.max_missing": 1.0},
    )  # fmt: skip
    assert run.status["state"] == "finished" and "part/classmate/missing" in run.metrics[-1]
