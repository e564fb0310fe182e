"""What verl imports in every process (`actor_rollout_ref.model.external_lib`): registers the agent loop."""

from __future__ import annotations

from upshot.cluster.adapters import loop

__all__ = ["loop"]
