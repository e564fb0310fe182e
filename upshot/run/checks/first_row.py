"""The first row as the policy will see it, and what the verifier says about three replies to it.

`upshot train --dry-run` prints both. A run whose verifier calls the reference wrong, or any other answer right, would
train to its end and learn nothing; here that shows before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from upshot.config.recipe import Recipe
from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import UserError
from upshot.core.event_loop import run_anywhere
from upshot.core.score import Reason, Score
from upshot.core.time_limit import call_seconds
from upshot.rewards.metric import VerifierMetric, score_by
from upshot.rollout.episode import with_system_prompt
from upshot.rollout.play import has_opening
from upshot.run.checks.context import CheckContext, Finding
from upshot.tasks.base import Task

FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "```python\n{}\n```")
"""How an answer may be written in a reply: plain, or as GSM8K, MATH and code verifiers want it. A task may have a form
of its own (`Task.answer_text`)."""
GSM8K = re.compile(r"\S.{20,}####\s*-?[\d,.]+\s*$", re.DOTALL)
"""A worked solution with its answer at the end."""
SHOWN = 600
"""Characters of a prompt or reference that are printed."""


def show_first_row(recipe: Recipe, offline: bool = False) -> tuple[list[str], list[Finding]]:
    """Lines about the first row of training, and what is wrong with its verdicts."""
    context = CheckContext(recipe, offline)
    if not context.sampled:
        return [], []
    rows = context.task.rows("train")
    row = rows[0]
    lines = [_entry("first row", _prompt(context, row))]
    if not _is_shown(row.reference):
        return lines, []
    lines.append(_entry("reference", str(row.reference)))
    call_seconds.set(recipe.call_seconds)
    verified = any(metric.name == "verifier" for metric in recipe.reward.metrics)
    verdicts = run_anywhere(_judge(context.task, rows)) if verified else {}
    if all(verdict.is_missing for verdict in verdicts.values()):  # an environment decides, or a judge that is not up
        return lines, []
    words = " · ".join(f"{what}: {_word(verdict)}" for what, verdict in verdicts.items())
    return [*lines, f"verifier   {words}"], list(_findings(context.task.name, row, verdicts))


async def _judge(task: Task, rows: Sequence[Row]) -> dict[str, Score]:
    """The verdicts on replies to the first row: its own reference, nothing, and the reference of another row."""
    row = rows[0]
    replies = [*(form.format(row.reference) for form in FORMS), task.answer_text(row)]
    of_forms = [await _verdict(task, row, reply) for reply in replies]
    verdicts = {"its reference": max(of_forms, key=lambda score: -1.0 if score.value is None else score.value)}
    verdicts["an empty reply"] = await _verdict(task, row, "")
    other = next((r.reference for r in rows if _is_shown(r.reference) and r.reference != row.reference), None)
    if other is not None:
        verdicts["another row's reference"] = await _verdict(task, row, str(other))
    return verdicts


def _is_shown(reference: object) -> bool:
    """Whether a reference is one text or number, which a reply can state."""
    return isinstance(reference, str | int | float) and reference != ""


async def _verdict(task: Task, row: Row, reply: str) -> Score:
    conversation = Conversation(row, 0, "first row")
    conversation.say(Message("assistant", reply), note={"finish": "stop"})
    try:
        return await score_by(VerifierMetric(task), conversation, "verifier")
    except UserError as error:  # no judge is up for a dry run
        return Score.missing(Reason.NOT_SCORED, str(error))


def _findings(task: str, row: Row, verdicts: dict[str, Score]) -> Iterator[Finding]:
    if task != "gsm8k" and GSM8K.match(str(row.reference)):
        yield Finding(
            "the references are worked solutions in GSM8K's format, of which only the number after #### is the answer; "
            f"with task.name={task} a reply must contain all of it: set task.name=gsm8k",
            fatal=False,
        )
    for what, verdict in verdicts.items():
        wanted = what == "its reference"
        if verdict.value is not None and (verdict.value > 0) != wanted:
            word, then = ("right", "rewards what is wrong") if not wanted else ("wrong", "can reward nothing")
            yield Finding(f"the verifier calls {what} {word} for the first row, so it {then}", fatal=False)


def _prompt(context: CheckContext, row: Row) -> str:
    """What the policy reads before its first reply, special tokens included where its tokenizer is here."""
    if not has_opening(row):
        return "the simulated user opens the conversation; its goal is " + str(row.goal)
    if not context.model_here:
        return "\n".join(f"{message.role}: {message.content}" for message in row.messages)
    opening = with_system_prompt(Conversation(row), context.recipe.episode.system)
    return context.renderer.decode(context.renderer.context(opening, context.task.tools()))


def _entry(name: str, text: str) -> str:
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    return f"{name:<11}" + shown.strip("\n").replace("\n", "\n" + " " * 11)


def _word(verdict: Score) -> str:
    if verdict.value is None:
        return f"no verdict ({verdict.reason})"
    return {0.0: "wrong", 1.0: "right"}.get(verdict.value, f"{verdict.value:.2g}")
