"""Fault 1: no released verl runs the published recipe. Ours needs none: it trains in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.collabllm.smoke import METHODS, smoke


def test_fault_1_the_recipe_ran_on_no_released_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verl", "ray", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    results = smoke(tmp_path, goals=10)
    assert set(results["metrics"]) == set(METHODS)
    assert [line["step"] for line in results["metrics"]["grpo"]] == [1, 2]
    assert all(line["reward/missing"] == 0 for line in results["metrics"]["grpo"])
