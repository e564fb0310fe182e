"""What verl imports in every process (`actor_rollout_ref.model.external_lib`): loop, estimator, rollout backend."""

from __future__ import annotations

from upshot.cluster.adapters import estimator, loop, rollout

__all__ = ["estimator", "loop", "rollout"]
