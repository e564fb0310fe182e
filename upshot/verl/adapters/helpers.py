"""Helper models that a recipe gives as folders, loaded once per node: in a Ray actor that all workers there call.

Each worker keeps its own counters, cache and limits. The actor has weights and engine, on the CPU, or on a GPU that Ray
counts in addition to those of verl's ranks (`device: cuda`).
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from upshot.config.model_spec import ModelSpec
from upshot.core.errors import UserError
from upshot.models.base import Completion, Model, Request
from upshot.models.local import LocalModel
from upshot.verl.adapters.budget import DEATHS, describe_death
from upshot.verl.helpers import gpus_of


class HelperActor:
    """Weights and engine of one helper model."""

    def __init__(self, spec: ModelSpec) -> None:
        self.local = LocalModel(spec)
        print(f"helper model {spec.model} is loaded on {os.uname().nodename}, {spec.device}", flush=True)

    async def start(self) -> tuple[Any, Any]:
        """Load it, once; returns its abilities and its tokenizer."""
        await self.local.start()
        assert self.local.inner is not None
        return self.local.inner.abilities, self.local.inner.tokenizer

    async def generate(self, request: Request) -> list[Completion]:
        """See `Model`."""
        assert self.local.inner is not None
        return await self.local.inner.generate(request)


class BorrowedHelper(Model):
    """The model of an actor, in a worker; closing it leaves the actor to the others."""

    def __init__(self, spec: ModelSpec, actor: Any) -> None:
        self.name = spec.model
        self.actor = actor

    async def start(self) -> None:
        """Wait until it is loaded."""
        self.abilities, self.tokenizer = await self._ask(self.actor.start.remote())

    async def generate(self, request: Request) -> list[Completion]:
        """The actor's completions."""
        return await self._ask(self.actor.generate.remote(request))

    async def _ask(self, answer: Any) -> Any:
        """The actor's answer, or the exception raised there, unwrapped."""
        try:
            return await answer
        except RayTaskError as error:
            raise error.cause from error
        except DEATHS as error:
            raise UserError(describe_death(f"the helper model '{self.name}'", error)) from error


async def borrow_helper(spec: ModelSpec) -> Model:
    """The model of this node's actor, which the first caller starts; if the node has no GPU, it is on another node."""
    node = ray.get_runtime_context().get_node_id()
    text = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()[:12]
    placed = spec.model_copy(update={"device": "cuda" if gpus_of(spec) else "cpu"})
    actor = ray.remote(HelperActor).options(
        name=f"upshot-helper-{text}-{node}",
        get_if_exists=True,
        num_cpus=0,
        num_gpus=gpus_of(spec),
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=bool(gpus_of(spec))),
        max_concurrency=10_000,
    )
    model = BorrowedHelper(spec, actor.remote(placed))
    await model.start()
    return model
