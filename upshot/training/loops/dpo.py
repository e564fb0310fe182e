"""Offline preference training: pairs of replies from a file, the better one against the worse one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

from upshot.config.method import TrainingMethod
from upshot.config.recipe import TrainConfig
from upshot.models.rendering import Renderer
from upshot.tasks.datasets.records import Preference, read_preferences
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.loops.evaluate import dpo_loss
from upshot.training.loops.minibatches import Lesson
from upshot.training.loops.phase import learn_examples, load_examples
from upshot.training.objectives.objectives import Dpo


async def train(run: LoopRun, config: TrainConfig, method: TrainingMethod) -> None:
    """Learn the pairs of `train.data` up to `train.steps`."""
    policy, pairs = run.policy, load_examples(run, config, method, render_pairs)

    def evaluate(learner: Learner) -> Logs:
        recipe = run.recipe
        held_out = read_preferences(str(recipe.eval.data), recipe.train.dpo.min_gap, "eval.data")[: recipe.eval.rows]
        return dpo_loss(learner, render_pairs(held_out, policy.renderer, policy.max_context))

    await learn_examples(run, config, pairs, prepare, evaluate)


def prepare(learner: Learner, pairs: Sequence[tuple[Datum, Datum]]) -> Lesson:
    """What is learned from pairs (chosen, rejected), with the reference's log-probabilities computed for them."""
    data = list(chain.from_iterable(pairs))
    for datum, reference in zip(data, learner.logprobs(data, reference=True) if data else (), strict=True):
        datum.reference = reference
    counts = {"train/pairs": float(len(pairs)), "train/tokens": float(sum(sum(datum.mask) for datum in data))}
    return Lesson(pairs, partial(Dpo, learner.config), counts=counts)


def render_pairs(preferences: Sequence[Preference], renderer: Renderer, max_context: int) -> list[tuple[Datum, Datum]]:
    """Pairs as token sequences, trained on the replies only; a pair that does not fit the context is left out."""
    pairs = []
    for preference in preferences:
        prompt = renderer.prompt_ids(preference.prompt)
        texts = (preference.chosen, preference.rejected)
        chosen, rejected = (reply_datum(prompt, renderer.render_reply(text)) for text in texts)
        if not max_context or max(len(chosen.ids), len(rejected.ids)) <= max_context:
            pairs.append((chosen, rejected))
    return pairs


def reply_datum(prompt: list[int], reply: list[int]) -> Datum:
    """A prompt and a reply as one sequence, trained on the reply."""
    return Datum([*prompt, *reply], [*[0] * len(prompt), *[1] * len(reply)])
