"""The body of `upshot eval monitor`: read, look at what was not looked at yet, tell.

Predictions go to OUT, one line a reply. Beside it OUT.log says with which settings they were made and what was spent:
the same command goes on behind it and tries again what failed; other settings are refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.core.score import LASTING, Reason, Score, tell_missing
from upshot.models.client.budget import Budget
from upshot.offline.data.gather import read_spec
from upshot.offline.data.journal import Journal
from upshot.offline.data.outage import Outage
from upshot.offline.monitor.cases import ROLLOUTS, MonitorItem, read_file, read_run
from upshot.offline.monitor.table import report, table
from upshot.offline.progress import progress
from upshot.offline.verify import VerifySettings
from upshot.rewards.monitor import Monitor, MonitorPrediction
from upshot.rollout.services import assemble


def run(args: argparse.Namespace) -> int:
    """Print how well the verdicts are predicted; 1 when not one prediction can be compared."""
    path = Path(args.source)
    path = path.parent if path.name == ROLLOUTS and path.is_file() else path
    items = _items(args, path)[: args.limit]
    out = Path(args.out or (path / "monitor.jsonl" if path.is_dir() else f"{path}.monitor.jsonl"))
    log = out.with_name(f"{out.name}.log")
    if out.is_file() and out.stat().st_size and not log.is_file():
        raise UserError(f"'{out}' is there, but not '{log}' with the settings it was made with; choose another --out")
    with (
        Journal(log, {name: getattr(args, name) for name in ("judge", "task", "option", "think")}) as journal,
        Journal(out, None, keep=settled) as results,
    ):
        lines = {line["key"]: line for line in results.lines}
        asyncio.run(_look(args, items, lines, journal, results))
    looks = [(item.step, _recalled(item, lines[item.key])) for item in items]
    found = report(looks)
    if args.json:
        print(json.dumps({**found, "file": str(out)}))
    else:
        print(table(str(path), found))
        for told in tell_missing(look.prediction for _, look in looks if look.invalid == "no_prediction"):
            print(f"  no prediction: {told}")
        print(f"every prediction is in {out}")
    return 0 if found["all"]["valid"] else 1


def _items(args: argparse.Namespace, path: Path) -> list[MonitorItem]:
    if path.is_dir():
        return read_run(path, args.task)
    if not path.is_file():
        raise UserError(f"'{args.source}' is neither a run folder nor a file of rows with thoughts")
    settings = VerifySettings(task=args.task, options=args.option, judge=args.judge)
    return read_file(path, settings, (args.think[0], args.think[1]))


def settled(line: Mapping[str, Any]) -> bool:
    """Whether another attempt would find the same."""
    scores = [Score.from_dict(line[name]) for name in ("verdict", "prediction")]
    return all(score.reason is None or score.reason in (*LASTING, Reason.NO_THOUGHT) for score in scores)


async def _look(
    args: argparse.Namespace, items: Sequence[MonitorItem], lines: dict[str, Any], log: Journal, results: Journal
) -> None:
    """Look at all items without a line; every line is on the disk as soon as it is known."""
    todo = [item for item in items if item.key not in lines]
    budget = Budget(max_calls=args.max_calls, max_dollars=args.max_dollars)
    if log.lines:
        budget.restore(log.lines[-1]["spent"])
    if not todo:
        return
    gate, outage = asyncio.Semaphore(args.at_once), Outage("looks")
    try:
        async with assemble(None, {"judge": read_spec(args.judge)}, budget=budget, sandbox=args.sandbox) as services:
            monitor = Monitor(services.models["judge"])

            async def one(item: MonitorItem, told: Callable[[], None]) -> None:
                async with gate:
                    case = item.case
                    if item.claim is not None and case.thought.strip():
                        case = replace(case, verdict=await services.manager.verify(item.claim))
                    look = await monitor.look(case)
                lines[item.key] = _line(item, look)
                results.append(lines[item.key])
                told()
                outage.heard(str(look.prediction.reason) if look.invalid == "no_prediction" else None)

            with progress("thoughts", len(items), len(items) - len(todo), args.quiet or args.json) as told:
                async with asyncio.TaskGroup() as tasks:
                    for item in todo:
                        tasks.create_task(one(item, told))
    finally:
        if budget.calls:
            log.append({"spent": budget.state()})


def _line(item: MonitorItem, look: MonitorPrediction) -> dict[str, Any]:
    scores = {"verdict": look.case.verdict.to_dict(), "prediction": look.prediction.to_dict()}
    return {"key": item.key, "step": item.step, "task": item.case.task, **scores, "invalid": look.invalid}


def _recalled(item: MonitorItem, line: Mapping[str, Any]) -> MonitorPrediction:
    case = replace(item.case, verdict=Score.from_dict(line["verdict"]))
    return MonitorPrediction(case, Score.from_dict(line["prediction"]))
