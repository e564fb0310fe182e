"""What verl imports in every process (`actor_rollout_ref.model.external_lib`): registers the loop and the estimator."""

from __future__ import annotations

from upshot.cluster.adapters import estimator, loop

__all__ = ["estimator", "loop"]
