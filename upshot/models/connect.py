"""Makes the models that a recipe names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from upshot.config.model_spec import ModelSpec
from upshot.core.errors import UserError
from upshot.models.base import Model
from upshot.models.client.budget import Budget
from upshot.models.client.guarded import GuardedModel, Guards
from upshot.models.client.limits import EndpointLimits
from upshot.models.client.replicas import ReplicatedModel
from upshot.models.client.routing import Routing
from upshot.models.endpoint import EndpointModel
from upshot.models.litellm import LiteLLMModel
from upshot.models.local import BorrowedModel, LocalModel
from upshot.models.scripted import ScriptedModel


class Endpoints:
    """Limits by endpoint, shared by all roles that call it; the first role's settings apply."""

    def __init__(self) -> None:
        self._limits: dict[str | tuple[str, ...], EndpointLimits] = {}
        self._routings: dict[str | tuple[str, ...], Routing] = {}

    def limits(self, spec: ModelSpec) -> EndpointLimits:
        """The limits of the spec's endpoint (a URL, or a provider's model)."""
        return self._limits.setdefault(spec.url or spec.model, EndpointLimits.of(spec))

    def routing(self, spec: ModelSpec) -> Routing:
        """The replicas of a spec, their loads and breakers."""
        limits = self.limits(spec)
        return self._routings.setdefault(spec.url or (), Routing(limits.concurrency, limits.slots))


def connect(
    spec: ModelSpec | Mapping[str, Any] | str,
    *,
    role: str = "",
    budget: Budget | None = None,
    endpoints: Endpoints | None = None,
    policy: Model | None = None,
    pool: Any = None,
) -> Model:
    """The model that a spec names, not yet started (`async with`, or `start()`).

    `role` is counted when a request names none; `budget` and `endpoints` are shared by the models of a run; `policy`
    is what the word 'policy' means; `pool` has places for models in this process (`swap.pool.ModelPool`).
    """
    spec = ModelSpec.parse(spec, f"models.{role}" if role else "")
    endpoints = endpoints or Endpoints()
    guards: Guards = {"role": role, "budget": budget, "limits": endpoints.limits(spec)}
    if spec.kind == "policy":
        if policy is None:
            raise UserError(f"{role or 'model'}: 'policy' means the model in training, but no model is trained here")
        when = spec.model.partition("@")[2]
        return BorrowedModel(spec, policy.copy_at(when) if when else policy, **guards)
    if spec.kind == "replicas":
        return ReplicatedModel(spec, lambda one: _backend(one)(one), endpoints.routing(spec), **guards)
    if spec.kind == "served":
        raise UserError(f"{role or 'model'}: '{spec.model}' needs `serve: FILE` in the recipe; or give a URL")
    if spec.kind == "local" and pool is not None:
        return LocalModel(spec, pool.slot(role), **guards)
    return _backend(spec)(spec, **guards)


def _backend(spec: ModelSpec) -> type[GuardedModel]:
    """The class for a spec; heavy libraries are imported when the model starts."""
    if spec.kind == "endpoint" and spec.via == "http":
        return EndpointModel
    if spec.kind in ("endpoint", "provider"):
        return LiteLLMModel
    return ScriptedModel if spec.kind == "scripted" else LocalModel


SHARED = ("endpoint", "provider", "replicas")
"""Kinds of models that all processes of a run call; the others belong to one process."""


def share_endpoints(models: Iterable[Model], processes: int) -> None:
    """Give a process its share of the limits of every endpoint it calls: at least one call at a time."""
    for model in dict.fromkeys(models):
        if isinstance(model, GuardedModel) and model.spec.kind in SHARED:
            model.limits.share(processes)


def connect_all(
    specs: Mapping[str, ModelSpec | Mapping[str, Any] | str],
    *,
    budget: Budget | None = None,
    policy: Model | None = None,
    pool: Any = None,
) -> dict[str, Model]:
    """Models by role; roles with the same spec share one model, so weights are loaded and connections opened once."""
    endpoints = Endpoints()
    by_spec: dict[str, Model] = {}
    out: dict[str, Model] = {}
    for role, named in specs.items():
        spec = ModelSpec.parse(named, f"models.{role}")
        key = spec.model_dump_json()
        if key not in by_spec:
            by_spec[key] = connect(spec, role=role, budget=budget, endpoints=endpoints, policy=policy, pool=pool)
        out[role] = by_spec[key]
    # Models in this process share the memory for keys and values with the others of their device.
    local = [model for model in by_spec.values() if isinstance(model, LocalModel) and not model.spec.kv_gb]
    for model in local:
        model.sharers = sum(other.spec.device == model.spec.device for other in local)
    return out
