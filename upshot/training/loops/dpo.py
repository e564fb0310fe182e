"""Offline preference training: pairs of replies from a file, the better one against the worse one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from upshot.config.recipe import TrainConfig
from upshot.core.conversation import derive_seed
from upshot.core.errors import UserError
from upshot.models.rendering import Renderer
from upshot.tasks.datasets.records import Preference, read_preferences
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import LoopRun
from upshot.training.loops.evaluate import Evaluator
from upshot.training.loops.sft import pick
from upshot.training.loops.validation import dpo_loss, held_out_pairs
from upshot.training.objectives.objectives import Dpo


async def train(run: LoopRun, config: TrainConfig) -> None:
    """Learn the pairs of `train.data` up to `config.steps`."""
    if not config.data:
        raise UserError("train.method 'dpo' needs train.data; make it with `upshot data prepare --for dpo`")
    preferences = read_preferences(config.data, config.dpo.min_gap)
    pairs = render_pairs(preferences, run.renderer, run.loaded.max_context)
    if len(pairs) < len(preferences):
        run.say(f"{len(preferences) - len(pairs)} of {len(preferences)} pairs are longer than the context")
    if not pairs:
        raise UserError(
            f"train.data '{config.data}': no pair is left to learn from (train.dpo.min_gap={config.dpo.min_gap:g})"
        )
    config = run.lasting(config, len(pairs))
    looks = Evaluator(run)
    if looks.enough:
        return  # a finished run was resumed
    learner = run.learner(config)
    run.keep_reference(learner)
    run.begin(learner, config)
    seed = derive_seed(run.recipe.seed, run.phase)

    async def look() -> dict[str, float]:
        return dpo_loss(learner, render_pairs(held_out_pairs(run), run.renderer, run.loaded.max_context))

    for step in range(run.step, config.steps):
        with run.meter.step() as times:
            evaluation = await looks.before(step, look)
            if looks.enough:
                looks.end(evaluation)
                break
            with run.ranks.update(), times.learning(learner):
                logs = prefer(learner, [pairs[i] for i in pick(len(pairs), config.prompts_per_step, step, seed)])
        run.step_done(step + 1, logs | evaluation | times.logs)
        await asyncio.sleep(0)  # where Ctrl-C arrives: between steps, never inside one
    run.checkpoint()
    await looks.last(look)


def prefer(learner: Learner, pairs: Sequence[tuple[Datum, Datum]]) -> dict[str, float]:
    """One optimizer step on pairs (chosen, rejected), with the reference's log-probabilities computed for them."""
    data = [datum for pair in pairs for datum in pair]
    for datum, reference in zip(data, learner.logprobs(data, reference=True), strict=True):
        datum.reference = reference
    logs = learner.forward_backward(pairs, Dpo(learner.config))
    logs |= learner.step()
    logs["train/pairs"] = float(len(pairs))
    logs["train/tokens"] = float(sum(sum(datum.mask) for datum in data))
    return logs


def render_pairs(preferences: Sequence[Preference], renderer: Renderer, max_context: int) -> list[tuple[Datum, Datum]]:
    """Pairs as token sequences, trained on the replies only; a pair that does not fit the context is left out."""
    pairs = []
    for preference in preferences:
        prompt = renderer.prompt_ids(preference.prompt)
        chosen, rejected = (_datum(prompt, renderer.completed(t)) for t in (preference.chosen, preference.rejected))
        if not max_context or max(len(chosen.ids), len(rejected.ids)) <= max_context:
            pairs.append((chosen, rejected))
    return pairs


def _datum(prompt: list[int], reply: list[int]) -> Datum:
    return Datum([*prompt, *reply], [*[0] * len(prompt), *[1] * len(reply)])
