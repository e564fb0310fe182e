"""Offline preference training: pairs of replies from a file, the better one against the worse one."""

from __future__ import annotations

from collections.abc import Sequence

from upshot.config.method import TrainingMethod, methods
from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.errors import UserError
from upshot.models.rendering import Renderer
from upshot.tasks.base import Task
from upshot.tasks.datasets.records import Preference, read_preferences
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.loops.evaluate import dpo_loss, read_held_out_pairs
from upshot.training.loops.minibatches import Lesson
from upshot.training.loops.phase import learn_examples
from upshot.training.objectives.objectives import Dpo


@methods.register("dpo")
class DPOMethod(TrainingMethod):
    """Pairs of replies from a file."""

    best_metric = "eval/loss/dpo"
    evaluates = ("loss/dpo", "dpo/margin", "dpo/accuracy")

    async def train(self, run: LoopRun, config: TrainConfig) -> None:
        """Learn the pairs of `train.data` up to `train.steps`."""
        policy, preferences = run.policy, self.examples(config, run.task)
        pairs = render_pairs(preferences, policy.renderer, policy.max_context)
        if len(pairs) < len(preferences):
            run.say(f"{len(preferences) - len(pairs)} of {len(preferences)} pairs are longer than the context")
        if not pairs:
            raise UserError(self.explain_empty(config, run.task))

        def evaluate(learner: Learner) -> Logs:
            held_out = read_held_out_pairs(run.recipe)
            return dpo_loss(learner, render_pairs(held_out, policy.renderer, policy.max_context))

        def prepare_some(learner: Learner, picked: Sequence[int]) -> Lesson:
            return prepare(learner, [pairs[i] for i in picked])

        await learn_examples(run, config, len(pairs), prepare_some, evaluate)

    def examples(self, config: TrainConfig, task: Task) -> list[Preference]:
        """The pairs of `train.data` whose scores are far enough apart."""
        if not config.data:
            raise UserError("train.method 'dpo' needs train.data; make it with `upshot data prepare --for dpo`")
        return read_preferences(config.data, config.dpo.min_gap)

    def needs_reference(self, config: TrainConfig) -> bool:
        """Pairs are compared with it."""
        return True

    def check(self, recipe: Recipe) -> None:
        """Refuse evaluation without held-out pairs."""
        if recipe.eval.every and not recipe.eval.data:
            raise UserError(
                "eval.every with train.method 'dpo' needs held-out pairs; set eval.data=FILE, or eval.every=0"
            )

    def explain_empty(self, config: TrainConfig, task: Task) -> str:
        """See `TrainingMethod`."""
        return f"train.data '{config.data}': no pair is left to learn from (train.dpo.min_gap={config.dpo.min_gap:g})"


def prepare(learner: Learner, pairs: Sequence[tuple[Datum, Datum]]) -> Lesson:
    """What is learned from pairs (chosen, rejected), with the reference's log-probabilities computed for them."""
    data = [datum for pair in pairs for datum in pair]
    for datum, reference in zip(data, learner.logprobs(data, reference=True) if data else (), strict=True):
        datum.reference = reference
    counts = {"train/pairs": float(len(pairs)), "train/tokens": float(sum(sum(datum.mask) for datum in data))}
    return Lesson(pairs, lambda: Dpo(learner.config), counts=counts)


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
