"""Imported by verl in every process (`actor_rollout_ref.model.external_lib`): agent loop, rollout backend."""

from __future__ import annotations

from upshot.verl.adapters import loop, rollout

__all__ = ["loop", "rollout"]
