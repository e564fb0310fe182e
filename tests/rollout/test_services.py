"""The services of a run."""

from __future__ import annotations

import asyncio

import pytest

from tests.training.workshop import recipe
from upshot.models.scripted import AbsentPolicy
from upshot.rollout.services import build_services
from upshot.tasks.base import tasks


class Closes:
    """Records that it was closed, then fails."""

    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self.closed = name, closed

    async def aclose(self) -> None:
        self.closed.append(self.name)
        raise OSError(self.name)


def test_all_services_are_closed_even_if_one_fails(tmp_path) -> None:
    made = recipe(tmp_path)
    services = build_services(made, tasks.create(made.task.name, made.task.options), AbsentPolicy(), None)
    closed: list[str] = []
    services.metrics = {name: Closes(name, closed) for name in ("first", "second")}  # type: ignore[misc]
    services.closers = [Closes("sandbox", closed)]
    with pytest.raises(OSError, match="sandbox"):
        asyncio.run(services.aclose())
    assert closed == ["first", "second", "sandbox"]
