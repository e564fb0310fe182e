"""A run of a few seconds for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import upshot

THIMBLE = {
    "name": "thimble",
    "model": {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32}},
    "task": {"name": "slots", "rows_per_split": 32},
    "episode": {"max_tokens": 4},
    "futures": {"samples": 2, "rounds": 1},
    "reward": {"metrics": ["verifier", {"name": "token_amount", "weight": -0.001}]},
    "train": {"steps": 2, "prompts_per_step": 2, "group_size": 2, "lr": 1e-3, "save": {"every": 1, "keep": 5}},
    "eval": {"every": 1, "rows": 2},
}


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run on a tiny model."""
    return upshot.train(THIMBLE, run_dir=tmp_path_factory.mktemp("runs") / "thimble").path
