"""A trial of what is the user's to get right: one row, a reply put into the policy's mouth, and every metric once.

Only `--dry-run` makes it: it calls the judge and the user once. No weights are loaded; where a helper is a model in
this process, or nobody may be called (--offline), what needs it is not tried, and that is said.
"""

from __future__ import annotations

from collections.abc import Iterator

from upshot.config.recipe import Recipe
from upshot.core.conversation import Conversation, Message
from upshot.core.errors import UserError
from upshot.core.event_loop import run_anywhere
from upshot.core.score import Reason, Score
from upshot.core.time_limit import call_seconds, limit_call
from upshot.models.scripted import AbsentPolicy
from upshot.rewards.metric import score_conversation
from upshot.rollout.episode import catch_failure
from upshot.rollout.play import has_opening
from upshot.rollout.services import build_services
from upshot.run.checks.context import CheckContext, Finding

OWN_FAULTS = (Reason.ERROR, Reason.NOT_A_SCORE)
"""Reasons that are the fault of a metric's, a user's or a verifier's code."""


def try_out(recipe: Recipe, offline: bool = False) -> Iterator[Finding]:
    """What a played row shows to be wrong; what could not be tried is said."""
    context = CheckContext(recipe, offline)
    if not context.sampled:
        return
    untried = {"local", "policy", "served"}  # kinds of models that are not up for a dry run
    models = recipe.needed_models.items()
    asked = [name for name, m in models if m.kind in untried or (offline and m.kind != "scripted")]
    if asked:
        yield Finding(f"the metrics were not tried on a row: they may call {', '.join(asked)}, not running yet", False)
        return
    try:
        scores = run_anywhere(_play(context))
    except UserError as error:
        if context.task.environment() is None:
            yield Finding(str(error))
        else:  # which may give the score itself, and was not there
            yield Finding(f"the metrics were not tried: the environment of '{context.task.name}' was not called", False)
        return
    for name, score in scores.items():
        if score.reason in OWN_FAULTS:
            yield Finding(f"{name} fails on a trial row: {score.why or score.reason}")
        elif score.is_missing:
            why = f": {score.why}" if score.why else ""
            yield Finding(f"{name} gave no score on a trial row ({score.reason}{why})", False)


async def _play(context: CheckContext) -> dict[str, Score]:
    call_seconds.set(context.recipe.call_seconds)
    tokenizer = context.tokenizer if context.model_here else None
    services = build_services(context.recipe, context.task, AbsentPolicy(), tokenizer)
    async with services:
        row = context.task.rows("train")[0]
        conversation = Conversation(row, context.recipe.seed, "trial")
        user = services.user
        if user is not None and not has_opening(row):
            failure = await catch_failure(limit_call(user, user.start, conversation), "user")
            if failure is not None:
                return {"the user": failure}
        words = row.reference if isinstance(row.reference, str) and row.reference else "OK."
        conversation.say(Message("assistant", words), note={"finish": "stop"})
        tried = {name: metric for name, metric in services.metrics.items() if not metric.loads_model}
        scores = await score_conversation(tried, conversation)
        tried_scores = {f"metric '{name}'": score for name, score in scores.items()}
        if user is not None and context.recipe.futures.rounds:
            failure_of_user = await catch_failure(limit_call(user, user.observe, conversation), "user")
            tried_scores |= {"the user": failure_of_user} if failure_of_user is not None else {}
        return tried_scores
