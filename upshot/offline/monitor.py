"""`upshot eval monitor RUN|FILE`: a model reads question and thought only and predicts the verifier's score.

Predictions go to OUT, one line a reply; beside it OUT.log says with which settings they were made and what was spent.
How a thought is shown and how predictions are measured: `rewards/monitor.py`; the report: `monitor_report.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from upshot.config.load import load_recipe
from upshot.core.conversation import Message
from upshot.core.errors import UserError, did_you_mean
from upshot.core.files import dump_json_line, read_jsonl
from upshot.core.score import LASTING, Reason, Score, tell_missing
from upshot.core.thought import find_thought
from upshot.offline.arguments import read_model, read_rows
from upshot.offline.job import Job, Journal, open_log
from upshot.offline.monitor_report import MonitorLook, make_report, table, tell_pairs, tell_views
from upshot.offline.replay import read_reply
from upshot.offline.verify import VerifySettings, check_verifier, claim_of, options_of, response_of, source_of
from upshot.rewards.monitor import (
    METRIC,
    VIEWS,
    Monitor,
    MonitorCase,
    MonitorPrediction,
    case_of,
    find_verifier,
)
from upshot.rewards.workers.base import Manager, managers
from upshot.rollout.services import assemble
from upshot.run.folder import ROLLOUTS
from upshot.tasks.base import Task, tasks
from upshot.tasks.datasets.records import row_of
from upshot.tasks.mix import KEY
from upshot.tasks.verifiers.base import Claim

THOUGHTS = ("thought", "reasoning", "reasoning_content")
"""Columns of a file that hold a thought."""


@dataclass(frozen=True, slots=True)
class MonitorItem:
    """A reply to look at, known again by its key."""

    key: str
    case: MonitorCase
    step: int | None = None
    claim: Claim | None = None
    """What gives the verdict, where the row does not have it; the case's own is missing until then."""
    pair: str = ""
    """Replies to the same question with and without an intervention share it."""
    intervened: bool = False

    @property
    def line_key(self) -> str:
        """Of its line: the views of a reply have one each."""
        return self.key if self.case.view == "thought" else f"{self.key} {self.case.view}"


def run(args: argparse.Namespace) -> int:
    """Look at what was not looked at yet, print how well verdicts are predicted; 1 when nothing can be compared."""
    path = Path(args.source)
    path = path.parent if path.name == ROLLOUTS and path.is_file() else path
    items = read_items(args, path)[: args.limit]
    if args.baselines:
        items = [replace(item, case=replace(item.case, view=view)) for item in items for view in VIEWS]
    out = Path(args.out or (path / "monitor.jsonl" if path.is_dir() else f"{path}.monitor.jsonl"))
    settings = {"judge": args.judge, "task": args.task, "option": args.options, "think": args.think}
    with open_log(out, settings) as log, Journal(out, keep=_is_settled) as results:
        lines = {line["key"]: line for line in results.lines}
        asyncio.run(_look(Job("looks", args, log, results), items, lines))
    looks = [_recall(item, lines[item.line_key]) for item in items]
    report = make_report(looks)
    if args.json:
        print(json.dumps({**report, "file": str(out)}))
    else:
        print("\n".join([table(str(path), report), *tell_views(report["views"]), *tell_pairs(report["pairs"])]))
        for told in tell_missing(seen.look.prediction for seen in looks if seen.look.invalid == "no_prediction"):
            print(f"  no prediction: {told}")
        print(f"every prediction is in {out}")
    return 0 if report["all"]["valid"] else 1


def _is_settled(line: Mapping[str, Any]) -> bool:
    """Whether another attempt would find the same."""
    scores = [Score.from_dict(line[name]) for name in ("verdict", "prediction")]
    return all(score.reason is None or score.reason in (*LASTING, Reason.NO_THOUGHT) for score in scores)


async def _look(job: Job, items: Sequence[MonitorItem], lines: dict[str, dict[str, Any]]) -> None:
    """Look at all items without a line, verifying first what has no verdict."""
    todo = [item for item in items if item.line_key not in lines]
    if not todo:
        return
    judge = {"judge": read_model(job.args.judge)}
    async with assemble(None, judge, budget=job.budget, sandbox=job.args.sandbox) as services:
        monitor = Monitor(services.models["judge"])

        async def one(item: MonitorItem) -> None:
            case = item.case
            if item.claim is not None and case.thought.strip():
                case = replace(case, verdict=await services.manager.verify(item.claim))
            look = await monitor.look(case)
            scores = {"verdict": case.verdict.to_dict(), "prediction": look.prediction.to_dict()}
            line = {"key": item.line_key, "step": item.step, "task": case.task, **scores, "invalid": look.invalid}
            lines[item.line_key] = line
            job.write(line, failure=str(look.prediction.reason) if look.invalid == "no_prediction" else None)

        await job.run(todo, one, len(items) - len(todo))


def _recall(item: MonitorItem, line: Mapping[str, Any]) -> MonitorLook:
    case = replace(item.case, verdict=Score.from_dict(line["verdict"]))
    look = MonitorPrediction(case, Score.from_dict(line["prediction"]))
    return MonitorLook(item.key, look, item.step, item.pair, item.intervened)


def read_items(args: argparse.Namespace, path: Path) -> list[MonitorItem]:
    """The replies of a run folder or of a file, each checked before any model is asked."""
    settings, manager = VerifySettings.of(args), managers.create("inline")
    if path.is_dir():
        items = _read_run(path, args.task, manager)
    elif path.is_file():
        rows = enumerate(read_rows(str(path)), 1)
        items = [_row_item(row, number, path, settings, args.think, manager) for number, row in rows]
    else:
        raise UserError(f"'{args.source}' is neither a run folder nor a file of rows with thoughts")
    if not items:
        raise UserError(f"'{path}' holds no replies")
    if not any(item.case.thought.strip() for item in items):
        raise UserError(
            f"no thoughts found in '{path}': none of its {len(items)} replies has one (a run: episode.think names the "
            f"markers; a file: a column {' or '.join(THOUGHTS)}, or a response with --think OPEN CLOSE)"
        )
    if path.is_dir() and all(item.case.verdict.reason is Reason.NOT_SCORED for item in items):
        raise UserError(f"no reply in '{path}' has a score of the metric '{METRIC}', which a monitor predicts")
    for source in dict.fromkeys(item.claim.source for item in items if item.claim is not None):
        check_verifier(source, options_of(settings), settings)
    return items


def _read_run(path: Path, only: str | None, manager: Manager) -> list[MonitorItem]:
    """The replies of a run's rollouts.jsonl; of one of its tasks where `only` says so."""
    if not (path / ROLLOUTS).is_file():
        raise UserError(f"'{path}' holds no {ROLLOUTS}: it is no run folder, or nothing was played in it yet")
    task = _task_of(path)
    items = [_line_item(line, index, task, manager) for index, line in enumerate(read_jsonl(path / ROLLOUTS))]
    own = [item for item in items if only in (None, item.case.task)]
    if items and not own:
        known = sorted({item.case.task for item in items})
        raise UserError(f"'{path}' has no replies of task '{only}'; {did_you_mean(only or '', known)}")
    return own


def _task_of(folder: Path) -> Task | None:
    """The task of a run, which knows the options of its verifiers; None where it cannot be opened here."""
    try:
        named = load_recipe(str(folder / "recipe.yaml")).recipe.task
        return tasks.create(named.name, named.options, "task")
    except UserError:
        return None


def _line_item(line: Mapping[str, Any], index: int, task: Task | None, manager: Manager) -> MonitorItem:
    reply = read_reply(line, {}, ())
    row = reply.conversation.row
    label = str((line.get("groups") or {}).get("task") or row.source or (task.name if task else ""))
    reply.conversation.row = replace(row, meta={KEY: label})
    return MonitorItem(
        _key(line, index), case_of(reply.conversation, reply.reward, task, manager, label), int(line["step"])
    )


def _row_item(
    row: Mapping[str, Any], number: int, path: Path, settings: VerifySettings, think: Sequence[str], manager: Manager
) -> MonitorItem:
    where = f"{path}, row {number}"
    thought, answer = _part(row, (think[0], think[1]))
    source, verdict = source_of(row, settings), _score(row, where)
    claim = Claim(source, "", None, {}, options_of(settings)) if source else None
    unverified = None
    if verdict is None:
        if not source:
            raise UserError(f"{where} has neither a 'score' nor a data_source to verify it by; say --task NAME")
        claim = unverified = claim_of({**row, "response": answer}, settings, number, str(path))
        verdict = Score.missing(Reason.NOT_SCORED, "not verified yet")
    label = str(row.get("data_source") or source)
    case = MonitorCase(_question(row, where), thought, verdict, find_verifier(claim, manager), label)
    case = replace(case, answer=answer or "")
    step, pair = row.get("step"), str(row.get("pair") or "")
    own = (step if isinstance(step, int) else None, unverified, pair, bool(row.get("intervention")))
    return MonitorItem(_key(row, number), case, *own)


def _part(row: Mapping[str, Any], think: tuple[str, str]) -> tuple[str, str | None]:
    """(thought, answer) of a row: from columns, or parted by the markers in its response."""
    response = response_of(row)
    column = next((row[name] for name in THOUGHTS if isinstance(row.get(name), str)), None)
    if column is not None or response is None:
        return column or "", response
    found = find_thought(response, think)
    return (response[found.start : found.stop], response[found.answer :].lstrip()) if found else ("", response)


def _question(row: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    try:
        return row_of(row, "").messages
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _score(row: Mapping[str, Any], where: str) -> Score | None:
    """The score that a row has, as a number or missing (`upshot verify --out` writes both); None where it has none."""
    given = row.get("score")
    if given is None or given == "":
        return Score.missing(str(row["missing"])) if row.get("missing") else None
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value <= 1:
        raise UserError(f"{where}: the score is {given!r}; a monitor predicts scores from 0 to 1")
    return Score(value)


def _key(row: Mapping[str, Any], index: int) -> str:
    """By what a reply is known again: its place, and all that it says."""
    return f"{index} {hashlib.blake2b(dump_json_line(row), digest_size=12).hexdigest()}"
