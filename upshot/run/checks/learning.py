"""Settings without effect, and what would run to its end and learn nothing: replies that are all alike, thoughts that
the model cannot mark."""

from __future__ import annotations

from collections.abc import Iterator

from upshot.config.method import method_of
from upshot.config.unread import describe_unread
from upshot.rollout.check_names import thought_key
from upshot.run.checks.context import CheckContext, Finding


def check(context: CheckContext) -> Iterator[Finding]:
    """Look at what the method reads, at how the policy is sampled and at what of its replies is trained."""
    # Files may share a section `train` between methods, so this is only worth knowing.
    yield from (Finding(says, fatal=False) for says in describe_unread(context.recipe).values())
    if not context.sampled:
        return
    method_of(context.recipe.train.method).check_loss(context.recipe)
    episode, key = context.recipe.episode, thought_key(context.recipe)
    # Replies that leave nothing to chance cannot be compared, and their log-probabilities have no gradient.
    says = "all replies to a row would be the same, and nothing is learned from them"
    if episode.temperature == 0:
        yield Finding(f"episode.temperature is 0: {says}; set it above 0 (eval.temperature is separate)")
    if episode.top_k == 1:
        yield Finding(f"episode.top_k is 1: {says}; set it to 2 or more, or to 0 for all tokens")
    if episode.think is None or not key or not context.model_here:
        return
    closing = episode.think[1]  # a model of few words may have none for it
    if context.tokenizer.decode(context.tokenizer.encode(closing, add_special_tokens=False)).strip() != closing.strip():
        yield Finding(
            f"{key} is thought, and the model has no token for '{closing}' (episode.think): none of its replies "
            f"can have a thought; set episode.think to markers that it has, or {key}=all"
        )
