"""Replies with thoughts from a run folder or a file, as cases for the monitor."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshot.config.load import load_recipe
from upshot.core.conversation import Conversation, Message, Row, Turn
from upshot.core.errors import UserError, did_you_mean
from upshot.core.files import dump_json_line, read_jsonl
from upshot.core.score import Reason, Score
from upshot.core.thought import find_thought
from upshot.offline.verify import VerifySettings, check_verifier, options_of, response_of, source_of
from upshot.offline.verify import claim_of as claim_of_row
from upshot.rewards.monitor import METRIC, MonitorCase, claim_of, thoughts, verdict_of, verifier_behind
from upshot.rewards.workers.base import Manager, managers
from upshot.tasks.base import Task, tasks
from upshot.tasks.datasets.files import read_table
from upshot.tasks.datasets.records import row_of
from upshot.tasks.mix import KEY
from upshot.tasks.verifiers.base import Claim

ROLLOUTS = "rollouts.jsonl"
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


def read_run(path: Path, only: str | None = None) -> list[MonitorItem]:
    """The replies of a run's rollouts.jsonl; of one of its tasks where `only` says so."""
    file = path / ROLLOUTS
    if not file.is_file():
        raise UserError(f"'{path}' holds no {ROLLOUTS}: it is no run folder, or nothing was played in it yet")
    task, manager = _task(path), managers.create("inline")
    items = [_of_line(line, index, task, manager) for index, line in enumerate(read_jsonl(file))]
    found = [item for item in items if only in (None, item.case.task)]
    if items and not found:
        raise UserError(f"'{path}' has no replies of task '{only}'; {did_you_mean(only or '', _tasks(items))}")
    _demand(found, str(path))
    if all(item.case.verdict.reason is Reason.NOT_SCORED for item in found):
        raise UserError(f"no reply in '{path}' has a score of the metric '{METRIC}', which a monitor predicts")
    return found


def _task(folder: Path) -> Task | None:
    """The task of a run, which knows the options of its verifiers; None where it cannot be opened here."""
    try:
        named = load_recipe(str(folder / "recipe.yaml")).recipe.task
        return tasks.create(named.name, named.options, "task")
    except UserError:
        return None


def _of_line(line: Mapping[str, Any], index: int, task: Task | None, manager: Manager) -> MonitorItem:
    turns = [Turn(Message.from_dict(said), note=said.get("note") or {}) for said in line["messages"]]
    start = _first_reply(line["messages"])
    opening = tuple(turn.message for turn in turns[:start])
    source, groups = str(line.get("source") or ""), line.get("groups") or {}
    label = str(groups.get("task") or source or (task.name if task else ""))
    row = Row(str(line["row"]), opening, source=source, meta={KEY: label})
    claim = claim_of(task, Conversation(row, turns=tuple(turns))) if task else Claim(source or label, "", None)
    case = MonitorCase(opening, thoughts(turns[start:]), _verdict(line), verifier_behind(claim, manager), label)
    return MonitorItem(_key(line, index), case, int(line["step"]))


def _first_reply(messages: Sequence[Mapping[str, Any]]) -> int:
    """Where the opening ends: at the first turn that was sampled, else at the last one of the assistant."""
    for index, said in enumerate(messages):
        if said.get("trained") or (said["role"] == "assistant" and "thought" in (said.get("note") or {})):
            return index
    spoken = [index for index, said in enumerate(messages) if said["role"] == "assistant"]
    return spoken[-1] if spoken else len(messages)


def _verdict(line: Mapping[str, Any]) -> Score:
    reward = line.get("reward") or {}
    means = {name: Score.from_dict(mean) for name, mean in (reward.get("means") or {}).items()}
    return verdict_of(means, Score.from_dict(reward.get("total") or {"missing": Reason.NOT_SCORED}))


def read_file(path: Path, settings: VerifySettings, think: tuple[str, str]) -> list[MonitorItem]:
    """The rows of a file, each checked before any model is asked."""
    rows = read_table(path)
    if not rows:
        raise UserError(f"'{path}' holds no rows")
    manager = managers.create("inline")
    items = [_of_row(row, number, path, settings, think, manager) for number, row in enumerate(rows, 1)]
    _demand(items, str(path))
    for source in dict.fromkeys(item.claim.source for item in items if item.claim is not None):
        check_verifier(source, options_of(settings), settings)
    return items


def _of_row(
    row: Mapping[str, Any], number: int, path: Path, settings: VerifySettings, think: tuple[str, str], manager: Manager
) -> MonitorItem:
    where = f"{path}, row {number}"
    thought, answer = _thought(row, think)
    source = source_of(row, settings)
    verdict = _score(row, where)
    claim = Claim(source, "", None, {}, options_of(settings)) if source else None
    unverified = None
    if verdict is None:
        if not source:
            raise UserError(f"{where} has neither a 'score' nor a data_source to verify it by; say --task NAME")
        claim = unverified = claim_of_row({**row, "response": answer}, settings, number, str(path))
        verdict = Score.missing(Reason.NOT_SCORED, "not verified yet")
    label = str(row.get("data_source") or source)
    case = MonitorCase(_question(row, where), thought, verdict, verifier_behind(claim, manager), label)
    step = row.get("step")
    return MonitorItem(_key(row, number), case, step if isinstance(step, int) else None, unverified)


def _thought(row: Mapping[str, Any], think: tuple[str, str]) -> tuple[str, str | None]:
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


def _demand(items: Sequence[MonitorItem], where: str) -> None:
    if not items:
        raise UserError(f"'{where}' holds no replies")
    if not any(item.case.thought.strip() for item in items):
        raise UserError(
            f"no thoughts found in '{where}': none of its {len(items)} replies has one (a run: episode.think names the "
            f"markers; a file: a column {' or '.join(THOUGHTS)}, or a response with --think OPEN CLOSE)"
        )


def _tasks(items: Sequence[MonitorItem]) -> list[str]:
    return sorted({item.case.task for item in items})


def _key(row: Mapping[str, Any], index: int) -> str:
    """By what a reply is known again: its place, and all that it says."""
    return f"{index} {hashlib.blake2b(dump_json_line(row), digest_size=12).hexdigest()}"
