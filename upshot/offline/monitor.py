"""`upshot eval monitor RUN|FILE`: a model reads question and thought only and predicts the verifier's score.

Predictions go to OUT, one line per reply; OUT.log beside it holds the settings and the spending. `rewards/monitor.py`
shows the thoughts and measures the predictions; `monitor_report.py` writes the report.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from upshot.config.load import load_recipe
from upshot.core.conversation import Message
from upshot.core.errors import UserError, did_you_mean
from upshot.core.files import read_jsonl
from upshot.core.score import LASTING, Reason, Score, describe_missing
from upshot.core.thought import split_thought
from upshot.offline.arguments import read_model, read_rows
from upshot.offline.job import Job, Journal, name_row, open_log
from upshot.offline.monitor_report import MonitoredReply, describe_pairs, describe_views, make_report, table
from upshot.offline.replay import read_reply
from upshot.offline.verify import VerifySettings, check_verifier, claim_of, options_of, response_of, source_of
from upshot.rewards.monitor import METRIC, VIEWS, Monitor, MonitorCase, case_of, find_verifier
from upshot.rewards.workers.base import Manager, managers
from upshot.rollout.services import assemble
from upshot.run.folder import ROLLOUTS
from upshot.tasks.base import Task, tasks
from upshot.tasks.datasets.records import row_of
from upshot.tasks.mix import KEY
from upshot.tasks.verifiers.base import Claim

THOUGHTS = ("thought", "reasoning", "reasoning_content")
"""Columns of a file that hold a thought."""


def run(args: argparse.Namespace) -> int:
    """Predict for all replies not done yet, and print how good the predictions are; 1 if nothing can be compared."""
    path = Path(args.source)
    path = path.parent if path.name == ROLLOUTS and path.is_file() else path
    replies = read_replies(args, path)[: args.limit]
    if args.baselines:
        replies = [replace(one, case=replace(one.case, view=view)) for one in replies for view in VIEWS]
    out = Path(args.out or (path / "monitor.jsonl" if path.is_dir() else f"{path}.monitor.jsonl"))
    settings = {"judge": args.judge, "task": args.task, "option": args.options, "think": args.think}
    with open_log(out, settings) as log, Journal(out, keep=_is_settled) as results:
        lines = {line["key"]: line for line in results.lines_of("key", "verdict", "prediction")}
        asyncio.run(_look(Job("looks", args, log, results), replies, lines))
    looks = [one.recall(lines[one.line_key]) for one in replies]
    report = make_report(looks)
    if args.json:
        print(json.dumps({**report, "file": str(out)}))
    else:
        print("\n".join([table(str(path), report), *describe_views(report["views"]), *describe_pairs(report["pairs"])]))
        for line in describe_missing(seen.look.prediction for seen in looks if seen.look.invalid == "no_prediction"):
            print(f"  no prediction: {line}")
        print(f"every prediction is in {out}")
    return 0 if report["all"]["valid"] else 1


def _is_settled(line: Mapping[str, Any]) -> bool:
    """Whether another attempt would give the same result."""
    scores = [Score.from_dict(line[name]) for name in ("verdict", "prediction") if name in line]
    return all(score.reason is None or score.reason in (*LASTING, Reason.NO_THOUGHT) for score in scores)


async def _look(job: Job, replies: Sequence[MonitoredReply], lines: dict[str, dict[str, Any]]) -> None:
    """Predict for all replies without a line; replies without a verdict are verified first."""
    todo = [one for one in replies if one.line_key not in lines]
    if not todo:
        return
    judge = {"judge": read_model(job.args.judge)}
    async with assemble(None, judge, budget=job.budget, sandbox=job.args.sandbox) as services:
        monitor = Monitor(services.models["judge"])

        async def one(reply: MonitoredReply) -> None:
            case = reply.case
            if reply.claim is not None and case.thought.strip():
                case = replace(case, verdict=await services.manager.verify(reply.claim))
            look = await monitor.look(case)
            scores = {"verdict": case.verdict.to_dict(), "prediction": look.prediction.to_dict()}
            line = {"key": reply.line_key, "step": reply.step, "task": case.task, **scores, "invalid": look.invalid}
            lines[reply.line_key] = line
            job.write(line, failure=str(look.prediction.reason) if look.invalid == "no_prediction" else None)

        await job.run(todo, one, len(replies) - len(todo))


def read_replies(args: argparse.Namespace, path: Path) -> list[MonitoredReply]:
    """The replies of a run folder or of a file, all checked before any model is called."""
    settings, manager = VerifySettings.of(args), managers.create("inline")
    if path.is_dir():
        replies = _read_run(path, args.task, manager)
    elif path.is_file():
        rows = enumerate(read_rows(str(path)), 1)
        replies = [_of_row(row, number, path, settings, args.think, manager) for number, row in rows]
    else:
        raise UserError(f"'{args.source}' is neither a run folder nor a file of rows with thoughts")
    if not replies:
        raise UserError(f"'{path}' has no replies")
    if not any(one.case.thought.strip() for one in replies):
        raise UserError(
            f"no thoughts found in '{path}': none of its {len(replies)} replies has one (a run: episode.think names "
            f"the markers; a file: a column {' or '.join(THOUGHTS)}, or a response with --think OPEN CLOSE)"
        )
    if path.is_dir() and all(one.case.verdict.reason is Reason.NOT_SCORED for one in replies):
        raise UserError(f"no reply in '{path}' has a score of the metric '{METRIC}', which a monitor predicts")
    for source in dict.fromkeys(one.claim.source for one in replies if one.claim is not None):
        check_verifier(source, options_of(settings), settings)
    return replies


def _read_run(path: Path, only: str | None, manager: Manager) -> list[MonitoredReply]:
    """The replies of a run's rollouts.jsonl, or only those of the task `only`."""
    if not (path / ROLLOUTS).is_file():
        raise UserError(f"'{path}' has no {ROLLOUTS}: it is not a run folder, or nothing has been played yet")
    try:
        named = load_recipe(str(path / "recipe.yaml")).recipe.task
        task: Task | None = tasks.create(named.name, named.options, "task")
    except UserError:  # the task cannot be opened here, so the options of its verifiers are unknown
        task = None
    replies = [_of_line(line, index, task, manager) for index, line in enumerate(read_jsonl(path / ROLLOUTS))]
    chosen = [one for one in replies if only in (None, one.case.task)]
    if replies and not chosen:
        known = {one.case.task for one in replies}
        raise UserError(f"'{path}' has no replies of task '{only}'; {did_you_mean(only or '', known)}")
    return chosen


def _of_line(line: Mapping[str, Any], index: int, task: Task | None, manager: Manager) -> MonitoredReply:
    reply = read_reply(line, {}, ())
    row = reply.conversation.row
    label = str((line.get("groups") or {}).get("task") or row.source or (task.name if task else ""))
    reply.conversation.row = replace(row, meta={KEY: label})
    case = case_of(reply.conversation, reply.reward, task, manager, label)
    return MonitoredReply(name_row(index, line), case, int(line["step"]))


def _of_row(
    row: Mapping[str, Any], number: int, path: Path, settings: VerifySettings, think: Sequence[str], manager: Manager
) -> MonitoredReply:
    where = f"{path}, row {number}"
    thought, answer = _part(row, (think[0], think[1]))
    source, verdict = source_of(row, settings), _score(row, where)
    claim = Claim(source, "", None, {}, options_of(settings)) if source else None
    unverified = None
    if verdict is None:
        if not source:
            raise UserError(f"{where} has neither a 'score' nor a data_source to verify it by; add --task NAME")
        claim = unverified = claim_of({**row, "response": answer}, settings, number, str(path))
        verdict = Score.missing(Reason.NOT_SCORED, "not verified yet")
    label = str(row.get("data_source") or source)
    case = MonitorCase(_question(row, where), thought, verdict, find_verifier(claim, manager), label, answer or "")
    step, pair = row.get("step"), str(row.get("pair") or "")
    facts = (step if isinstance(step, int) else None, unverified, pair, bool(row.get("intervention")))
    return MonitoredReply(name_row(number, row), case, *facts)


def _part(row: Mapping[str, Any], think: tuple[str, str]) -> tuple[str, str | None]:
    """(thought, answer) of a row: from columns, or its response split at the markers."""
    response = response_of(row)
    column = next((row[name] for name in THOUGHTS if isinstance(row.get(name), str)), None)
    if column is not None or response is None:
        return column or "", response
    return split_thought(response, think)


def _question(row: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    try:
        return row_of(row, "").messages
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _score(row: Mapping[str, Any], where: str) -> Score | None:
    """The row's score, as a number or missing (`upshot verify --out` writes both); None if it has no score."""
    score = row.get("score")
    if score is None or score == "":
        return Score.missing(str(row["missing"])) if row.get("missing") else None
    try:
        value = float(score)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value <= 1:
        raise UserError(f"{where}: the score is {score!r}; a monitor predicts scores from 0 to 1")
    return Score(value)
