"""verl's agent loop around `Worker`: one instance a trajectory, one worker a process."""

from __future__ import annotations

import logging
import os
import time
from typing import Any
from uuid import uuid4

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from upshot import config
from upshot.cluster.config import RECIPE
from upshot.cluster.parquet import AGENT
from upshot.cluster.served import Line
from upshot.cluster.worker import Order, Worker
from upshot.errors import UserError
from upshot.recipe import Recipe
from upshot.score import Score

log = logging.getLogger(__name__)
_workers: dict[str, Worker] = {}


class ScoredOutput(AgentLoopOutput):  # type: ignore[misc]
    """An output with a score a token: verl's own has one number, and asks `as_dict` for the rest."""

    token_scores: list[float]

    def as_dict(self) -> dict[str, Any]:
        """The row of the batch."""
        out: dict[str, Any] = super().as_dict()
        out["rm_scores"] = torch.tensor(out.pop("token_scores"), dtype=torch.float32)
        return out


@register(AGENT)
class UpshotLoop(AgentLoopBase):  # type: ignore[misc]
    """Plays an episode and its futures; the reward goes back with the tokens. A missing reward leaves no row."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> ScoredOutput | list[ScoredOutput]:
        """One trajectory, or none."""
        started = time.perf_counter()
        rollout = self.rollout_config
        worker = worker_here(self.tokenizer, int(rollout.max_model_len or 0))
        line = Line(self.server_manager, uuid4().hex, sampling_params)
        order = Order(row["extra_info"], row["raw_prompt"], str(row["uid"]), int(row["session_id"]), step_of(row))
        found = await worker.trajectory(order, line, int(rollout.prompt_length), int(rollout.response_length))
        if isinstance(found, Score):
            log.warning("row '%s' has no reward: %s %s", order.extra_info["id"], found.reason, dict(found.detail))
            return []
        return ScoredOutput(
            prompt_ids=found.prompt_ids,
            response_ids=found.response_ids,
            response_mask=found.response_mask,
            response_logprobs=found.response_logprobs,
            reward_score=found.score,
            token_scores=found.token_scores,
            num_turns=found.turns,
            metrics={"generate_sequences": time.perf_counter() - started},
            extra_fields={**line.extra, "reward_extra_info": found.metrics, "turn_scores": [], "tool_rewards": []},
        )


def worker_here(tokenizer: Any, max_context: int) -> Worker:
    """The worker of this process, made at the first call."""
    path = recipe_path()
    if path not in _workers:
        _workers[path] = Worker(recipe_here(), tokenizer, max_context)
    return _workers[path]


def recipe_here() -> Recipe:
    """The recipe that this process was started for."""
    return config.load(recipe_path()).recipe


def recipe_path() -> str:
    """Where the recipe is."""
    path = os.environ.get(RECIPE)
    if not path:
        raise UserError(f"this process of verl was not told its recipe: set {RECIPE} in Ray's runtime_env.env_vars")
    return path


def step_of(row: dict[str, Any]) -> int:
    """The step that a row is played for."""
    return int(row.get("global_steps", 0))
