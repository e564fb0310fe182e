"""Offline preference training: pairs of replies from a file, the better one against the worse one."""

from __future__ import annotations

from collections.abc import Sequence

from upshot.config.recipe import TrainConfig
from upshot.core.conversation import derive_seed
from upshot.core.errors import UserError
from upshot.models.rendering import Renderer
from upshot.tasks.datasets.records import Preference, read_preferences
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.loops.evaluate import dpo_loss, read_held_out_pairs
from upshot.training.loops.minibatches import Round, pick, update
from upshot.training.loops.phase import TrainingPhase
from upshot.training.objectives.objectives import Dpo


async def train(run: LoopRun, config: TrainConfig) -> None:
    """Learn the pairs of `train.data` up to `train.steps`."""
    if not config.data:
        raise UserError("train.method 'dpo' needs train.data; make it with `upshot data prepare --for dpo`")
    policy, preferences = run.policy, read_preferences(config.data, config.dpo.min_gap)
    pairs = render_pairs(preferences, policy.renderer, policy.max_context)
    if len(pairs) < len(preferences):
        run.say(f"{len(preferences) - len(pairs)} of {len(preferences)} pairs are longer than the context")
    if not pairs:
        raise UserError(
            f"train.data '{config.data}': no pair is left to learn from (train.dpo.min_gap={config.dpo.min_gap:g})"
        )
    phase = TrainingPhase(run, config, len(pairs))
    if phase.stopped:
        return
    learner = phase.begin(reference=True)
    seed = derive_seed(run.recipe.seed, run.phase)

    async def evaluate() -> Logs:
        return dpo_loss(learner, render_pairs(read_held_out_pairs(run.recipe), policy.renderer, policy.max_context))

    async for step in phase.steps(evaluate):
        picked = pick(len(pairs), config.prompts_per_step, step.number, seed)
        with step.learning():
            some, order = [pairs[i] for i in picked], derive_seed(seed, "minibatches", step.number)
            step.logs = update(learner, prepare(learner, some), order) | step.evaluation
    await phase.finish(evaluate)


def prepare(learner: Learner, pairs: Sequence[tuple[Datum, Datum]]) -> Round:
    """What is learned from pairs (chosen, rejected), with the reference's log-probabilities computed for them."""
    data = [datum for pair in pairs for datum in pair]
    for datum, reference in zip(data, learner.logprobs(data, reference=True) if data else (), strict=True):
        datum.reference = reference
    counts = {"train/pairs": float(len(pairs)), "train/tokens": float(sum(sum(datum.mask) for datum in data))}
    return Round(pairs, lambda: Dpo(learner.config), counts=counts)


def render_pairs(preferences: Sequence[Preference], renderer: Renderer, max_context: int) -> list[tuple[Datum, Datum]]:
    """Pairs as token sequences, trained on the replies only; a pair that does not fit the context is left out."""
    pairs = []
    for preference in preferences:
        prompt = renderer.prompt_ids(preference.prompt)
        chosen, rejected = (_datum(prompt, renderer.render_reply(t)) for t in (preference.chosen, preference.rejected))
        if not max_context or max(len(chosen.ids), len(rejected.ids)) <= max_context:
            pairs.append((chosen, rejected))
    return pairs


def _datum(prompt: list[int], reply: list[int]) -> Datum:
    return Datum([*prompt, *reply], [*[0] * len(prompt), *[1] * len(reply)])
