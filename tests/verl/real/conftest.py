"""Real runs of verl, run only by `make test-cluster`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them if verl is not installed."""
    missing = pytest.mark.skip(reason="verl is not installed here: `make test-cluster`")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(7200))
            if importlib.util.find_spec("verl") is None:
                item.add_marker(missing)
