"""Held-out rows while training: the same scene, its own temperature, nothing learned.

A step's line has the evaluation of the weights that played the step's rollouts, so evaluation comes before learning:
nothing is awaited between an optimizer step and its line in the run folder, and Ctrl-C finds a consistent run.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from upshot.chat import derive_seed
from upshot.rollout.play import Scene, play_step
from upshot.rollout.policy import Policy
from upshot.train.summary import by_group, summarise

if TYPE_CHECKING:
    from upshot.train.runner import Run

ONLY = ("eval/", "time/eval")
"""What a line of nothing but an evaluation has."""
KEPT = ("reward/", "metric/", "missing/", "rollout/reply_tokens", "rollout/turns")


async def held_out(run: Run, scene: Scene, step: int) -> dict[str, float]:
    """Metrics on the validation split under `eval/`, when the recipe evaluates after this many steps."""
    config = run.recipe.eval
    return await _play(run, scene) if config.every and step % config.every == 0 else {}


async def last_look(run: Run, scene: Scene) -> None:
    """Evaluate the finished model, as a line of its own; an interrupted one is made up for when the run goes on."""
    if last_look_due(run):
        logs = await _play(run, scene)
        run.folder.metrics(run.phase, run.step, logs)
        run.announce(run.step, logs)


def last_look_due(run: Run) -> bool:
    """Whether the recipe evaluates and the run's last step has no line of nothing but its evaluation yet."""
    lines = run.folder.lines(run.phase, run.step)
    looked = (all(key in ("phase", "step") or key.startswith(ONLY) for key in line) for line in lines)
    return bool(run.recipe.eval.every) and not any(looked)


async def _play(run: Run, scene: Scene) -> dict[str, float]:
    config = run.recipe.eval
    started = time.perf_counter()
    policy = scene.policy
    sampling = replace(policy.sampling, temperature=config.temperature)
    calm = Policy(policy.model, policy.renderer, sampling, policy.max_context, policy.system, policy.tools)
    rows = list(run.task.rows("validation")[: config.rows])
    groups = await play_step(replace(scene, policy=calm), rows, 1, derive_seed(run.recipe.seed, "eval"))
    logs = {key: value for key, value in summarise(groups, scene.weights).items() if key.startswith(KEPT)}
    logs |= by_group(
        (reply for group in groups for reply in group),
        lambda reply: run.task.groups(reply.conversation.row),
        lambda reply: reply.reward.total,
    )
    return {f"eval/{key}": value for key, value in logs.items()} | {"time/eval": time.perf_counter() - started}
