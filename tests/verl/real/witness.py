"""Writes down what the servers sampled and what the trainer trains on; verl imports it in place of our `register`.

    actor_rollout_ref.model.external_lib=tests.verl.real.witness

It only looks on. `STALE` makes it the negative control: from that step on the servers are sent no weights.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verl.workers.engine_workers as engine_workers
from verl.workers.rollout.llm_server import LLMServerClient

from upshot.verl.adapters import (
    register,  # noqa: F401  what this stands in for
    rollout,
)

LIB = "actor_rollout_ref.model.external_lib=tests.verl.real.witness"
FOLDER, STALE = "UPSHOT_WITNESS", "UPSHOT_STALE"


def note(kind: str, **what: Any) -> None:
    """Write a line to the folder that the run was given."""
    if folder := os.environ.get(FOLDER):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / f"{kind}.{os.getpid()}").open("a") as file:
            file.write(json.dumps(what) + "\n")


def notes(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """What all processes noted."""
    for path in sorted(folder.glob(f"{kind}.*")):
        yield from map(json.loads, path.read_text().splitlines())


def seen_sampling(generate: Any) -> Any:
    @functools.wraps(generate)
    async def wrapped(self: Any, request_id: str, **asked: Any) -> Any:
        out = await generate(self, request_id, **asked)
        told = {"request": request_id, "step": out.extra_fields.get("global_steps"), "params": asked["sampling_params"]}
        note("sampled", prompt=list(asked["prompt_ids"]), ids=list(out.token_ids), **told)
        return out

    return wrapped


def seen_server(acquire: Any) -> Any:
    @functools.wraps(acquire)
    async def wrapped(self: Any, request_id: str, **asked: Any) -> Any:
        server, handle = await acquire(self, request_id, **asked)
        note("server", request=request_id, server=server)
        return server, handle

    return wrapped


def seen_loss(loss: Any) -> Any:
    @functools.wraps(loss)
    def wrapped(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        columns = [data[name].unbind() for name in ("prompts", "responses", "response_mask")]
        for prompt, ids, mask in zip(*columns, strict=True):
            note("trained", prompt=prompt.tolist(), ids=ids.tolist(), mask=mask.int().tolist())
        return loss(config=config, model_output=model_output, data=data, dp_group=dp_group)

    return wrapped


class StaleRollout(rollout.UpshotRollout):
    """Sends the servers no weights from a given step on."""

    async def update_weights(self, weights: Any, global_steps: int | None = None, **more: Any) -> None:
        """Send them, or drain them: other ranks wait for each."""
        if (global_steps or 0) < int(os.environ[STALE]):
            await super().update_weights(weights, global_steps=global_steps, **more)
        else:
            for _name, _tensor in weights:
                pass


LLMServerClient.generate = seen_sampling(LLMServerClient.generate)
LLMServerClient._acquire_server = seen_server(LLMServerClient._acquire_server)
engine_workers.ppo_loss = seen_loss(engine_workers.ppo_loss)
if os.environ.get(STALE):
    rollout._ROLLOUT_REGISTRY[rollout.BACKEND, "async"] = f"{__name__}.{StaleRollout.__name__}"
