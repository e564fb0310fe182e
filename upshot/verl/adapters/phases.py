"""Reports what the trainer is doing to the budget's actor, so that a stuck run can say where."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar

from upshot.core.errors import UserError
from upshot.verl.adapters.budget import find_budget
from upshot.verl.table import PHASES

Trainer = TypeVar("Trainer", bound=type)


def report_phases(trainer: Trainer) -> Trainer:
    """A trainer class that reports its phases."""
    for method, phase in PHASES.items():
        setattr(trainer, method, _announce(getattr(trainer, method), phase))
    return trainer


def _announce(method: Callable[..., Any], phase: str) -> Callable[..., Any]:
    """A method that first reports its phase, without waiting for an answer."""

    @wraps(method)
    def announced(*args: Any, **named: Any) -> Any:
        with suppress(UserError):  # without the actor, the driver ends the run by itself
            find_budget().set_phase.remote(phase)
        return method(*args, **named)

    return announced
