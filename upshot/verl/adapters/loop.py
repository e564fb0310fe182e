"""verl's agent loop around `RolloutWorker`: one instance per trajectory, one worker per process."""

from __future__ import annotations

import logging
import os
import time
from typing import Any
from uuid import uuid4

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError, user_error_in
from upshot.training.learner.distributed.pickling import dumps
from upshot.verl.adapters.budget import DEATHS, budget_client, describe_death
from upshot.verl.adapters.helpers import borrow_helper
from upshot.verl.plan import RECIPE
from upshot.verl.rows import AGENT
from upshot.verl.served import ConversationLink
from upshot.verl.trajectory import Trajectory, refuse_long, reward_numbers, trajectories_of
from upshot.verl.worker import PlayRequest, RolloutWorker

log = logging.getLogger(__name__)

_workers: dict[str, RolloutWorker] = {}


REPLY, FAULT, COUNTED = "upshot_reply", "upshot_fault", "upshot_counted"
"""Extra fields of a row: the reply as bytes, in the first of its rows; an error that the user can fix; how many
replies its worker had played by then, and the counters of the worker's helpers."""


@register(AGENT)
class UpshotLoop(AgentLoopBase):  # type: ignore[misc]
    """Plays an episode and its futures; returns the whole reply, missing or not, with the tokens to train."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """The rows of a reply."""
        started = time.perf_counter()
        rollout = self.rollout_config
        servers, seeded = Servers(self.server_manager), rollout.name == AGENT
        link = ConversationLink(servers, uuid4().hex, sampling_params, seeded=seeded)
        request = PlayRequest(row["extra_info"], int(row["session_id"]), int(row.get("global_steps", 0)) - 1)
        filler = int(self.tokenizer.eos_token_id)
        try:
            worker = worker_here(self.tokenizer, int(rollout.max_model_len or 0), int(rollout.agent.num_workers))
            reply = await worker.play(request, link)
            refuse_long(reply, int(rollout.prompt_length), int(rollout.response_length))
            extra: dict[str, Any] = {REPLY: dumps(reply)}
        except Exception as error:  # verl would continue without the row: the trainer stops, with the reason
            user_error = user_error_in(error)
            if user_error is None:
                log.exception("a conversation could not be played")
            why = str(user_error or f"{type(error).__name__}: {error}; where it was raised is in verl.log")
            return [_output(Trajectory([filler], [filler], [0], [0.0]), 0.0, {FAULT: why}, started)]
        seen = reward_numbers(reply, list(worker.services.weights))
        extra[COUNTED] = (worker.name, worker.played, worker.services.counters())
        extra |= {**link.extra, "reward_extra_info": seen, "turn_scores": [], "tool_rewards": []}
        score = reply.reward.total.value or 0.0
        rows = trajectories_of(reply, filler, worker.recipe.train.trains_every_fork, maybe=True)
        return [
            _output(part, score, extra if not number else {**extra, REPLY: b""}, started, len(reply.conversation.turns))
            for number, part in enumerate(rows if request.trains else rows[:1])
        ]


def _output(part: Trajectory, score: float, extra: dict[str, Any], started: float, turns: int = 0) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=part.prompt_ids,
        response_ids=part.response_ids,
        response_mask=part.response_mask,
        response_logprobs=part.response_logprobs,
        reward_score=score,
        num_turns=turns,
        metrics={"generate_sequences": time.perf_counter() - started},
        extra_fields={"reward_extra_info": {}, **extra},
    )


class Servers:
    """verl's server manager; if a server dies, the run ends, because verl would go on sending it conversations."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        """See `served.ServerManager`."""
        try:
            return await self.manager.generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params)
        except DEATHS as error:
            raise UserError(describe_death("a rollout server", error)) from error


def worker_here(tokenizer: Any, max_context: int, workers: int) -> RolloutWorker:
    """The worker of this process, created at the first call; inside Ray it shares the run's budget and limits."""
    path = recipe_path()
    if path not in _workers:
        client, borrow = (budget_client(), borrow_helper) if ray.is_initialized() else (None, None)
        name = f"pid {os.getpid()} on {os.uname().nodename}"
        _workers[path] = RolloutWorker(recipe_here(), tokenizer, max_context, client, name, workers, borrow)
    return _workers[path]


def recipe_here() -> Recipe:
    """The recipe that this process was started for."""
    return load_recipe(recipe_path()).recipe


def recipe_path() -> str:
    """Where the recipe is."""
    path = os.environ.get(RECIPE)
    if not path:
        raise UserError(f"this process of verl does not know its recipe: set {RECIPE} in Ray's runtime_env.env_vars")
    return path
