"""Fault 1: no released verl runs the published recipe. Ours does not need verl: it trains in this process."""

from __future__ import annotations

from typing import Any

from tests.collabllm.smoke import METHODS


def test_fault_1_the_recipe_ran_on_no_released_verl(smoked: dict[str, Any]) -> None:
    assert set(smoked["metrics"]) == set(METHODS)
    assert [line["step"] for line in smoked["metrics"]["grpo"]] == [1, 2]
    assert all(line["reward/missing"] == 0 for line in smoked["metrics"]["grpo"])
