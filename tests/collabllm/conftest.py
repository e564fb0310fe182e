"""One smoke run shared by all tests that check its results; no network, verl, Ray or vLLM."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from tests.collabllm.smoke import smoke


def forbid_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attempt to connect raises an error."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_network(monkeypatch)


@pytest.fixture(scope="session")
def smoked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of `smoke`: table, metrics and checkpoints of all five recipes on twenty goals."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        forbid_network(monkeypatch)
        for name in ("verl", "ray", "vllm"):
            monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
        return smoke(tmp_path_factory.mktemp("smoke"))
