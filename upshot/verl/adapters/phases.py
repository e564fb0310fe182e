"""What the trainer is doing, reported to the budget's actor: a run that is stuck says where."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from upshot.core.errors import UserError
from upshot.verl.adapters.budget import find_budget

PHASES = {
    "_setup": "starting workers and servers",
    "_load_checkpoint": "loading a checkpoint",
    "on_init_end": "weight sync to the servers (the first)",
    "on_sample_begin": "rollouts: waiting for conversations",
    "on_sample_end": "putting the servers to sleep",
    "_compute_old_log_prob": "log-probabilities",
    "_compute_ref_log_prob": "log-probabilities of the reference",
    "_update_critic": "updating the critic",
    "_update_actor": "updating the policy",
    "on_step_end": "weight sync to the servers",
    "_validate": "validation: waiting for conversations",
    "_save_checkpoint": "saving a checkpoint",
}
"""Methods of verl's trainer, and what they do."""
Trainer = TypeVar("Trainer", bound=type)


def report_phases(trainer: Trainer) -> Trainer:
    """A trainer class that says what it does."""
    for method, phase in PHASES.items():
        setattr(trainer, method, _announce(getattr(trainer, method), phase))
    return trainer


def _announce(does: Callable[..., Any], phase: str) -> Callable[..., Any]:
    @wraps(does)
    def announced(*args: Any, **named: Any) -> Any:
        tell_phase(phase)
        return does(*args, **named)

    return announced


def tell_phase(phase: str) -> None:
    """Say it, and wait for nobody."""
    try:
        find_budget().set_phase.remote(phase)
    except UserError:  # without it the driver ends the run by itself
        return
