"""Score a file of conversations: concurrent, resumable, with a summary that counts what is missing and why.

Results go to OUT, one line a reply. Beside it OUT.log says with which settings they were made, which rows are finished
and what was spent: the same command goes on behind it and tries again what failed; other settings are refused.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from upshot.api.scorer import METRICS, Scorer, first_of, open_rater
from upshot.config.registry import import_thing
from upshot.core.errors import UserError
from upshot.core.files import dump_json_line, read_jsonl
from upshot.core.score import LASTING, Score, tell_missing
from upshot.models.client.budget import Budget
from upshot.offline.data.journal import Journal
from upshot.rewards.build import ARROW
from upshot.rollout.rollout import Rollout
from upshot.tasks.datasets.files import read_table
from upshot.tasks.datasets.records import RecordedReplies, read_replies


def score_file(args: argparse.Namespace) -> int:
    """Do what `upshot score` was asked for."""
    path = Path(args.file)
    if not path.is_file():
        raise UserError(f"no file '{args.file}' to score")
    given = read_table(path)[: args.limit]
    if not given:
        raise UserError(f"'{args.file}' holds no rows to score")
    records = read_replies(given, futures=args.rounds > 0)
    work = {name_of(record, row): record for record, row in zip(records, given, strict=True)}
    out = Path(args.out or f"{path}.scores.jsonl")
    log = out.with_name(f"{out.name}.log")
    if out.is_file() and out.stat().st_size and not log.is_file():
        raise UserError(f"'{out}' is there, but not '{log}' with the settings it was made with; choose another --out")
    settings = _settings(args)
    with Journal(log, {**settings, "seed": args.seed, **_own_code(settings["metrics"])}) as journal:
        done = {line["record"] for line in journal.lines if not line["failed"]} & work.keys()
        with Journal(out, None, keep=lambda line: line["record"] in done) as results:
            if done:
                print(f"{len(done)} of {len(work)} rows are in {out} already")
            todo = {name: record for name, record in work.items() if name not in done}
            asyncio.run(_score(args, settings, todo, journal, results))
    lines = read_jsonl(out)
    print(summary(lines))
    print(f"written to {out}")
    return 1 if any(line["reward"]["total"].get("missing") for line in lines) else 0


def name_of(record: RecordedReplies, row: Mapping[str, Any]) -> str:
    """By what a row is known again: its id, and all that it says."""
    return f"{record.row.id} {hashlib.blake2b(dump_json_line(row), digest_size=12).hexdigest()}"


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the results depend on, as `open_rater` takes it."""
    return {
        "metrics": parse_metrics(args.metric) or METRICS,
        "rounds": args.rounds,
        "samples": args.samples,
        "tokenizer": args.tokenizer,
        "max_reply_tokens": args.max_reply_tokens,
        "overlong": args.overlong,
        "task": args.task,
        "user_options": {"persona": args.persona, "vagueness": args.vagueness},
        **{role: parse_model(getattr(args, role)) for role in ("policy", "user", "judge")},
    }


def _own_code(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The files of the user's own metrics, by their content: results of what they were before are not those of now."""
    found = {}
    for name in metrics:
        path = name.split(ARROW)[-1].strip()
        if ":" in path:
            file = inspect.getsourcefile(import_thing(path, "metric", "--metric"))
            content = Path(file).read_bytes() if file else b""
            found[name] = hashlib.blake2b(content, digest_size=8).hexdigest()
    return {"code": found} if found else {}


async def _score(
    args: argparse.Namespace,
    settings: Mapping[str, Any],
    work: Mapping[str, RecordedReplies],
    log: Journal,
    results: Journal,
) -> None:
    if not work:
        return
    budget = Budget(max_calls=args.max_calls, max_dollars=args.max_dollars)
    if log.lines:
        budget.restore(max((line["spent"] for line in log.lines), key=lambda spent: spent["calls"]))

    def finished(name: str, replies: Sequence[Rollout]) -> None:
        results.extend({**reply.to_dict(0), "record": name} for reply in replies)
        log.append({"record": name, "failed": any(map(may_pass, replies)), "spent": budget.state()})

    try:
        async with open_rater(**settings, sandbox=args.sandbox, budget=budget) as scorer:
            await score_records(scorer, work, finished, args.at_once, args.seed)
    finally:
        if budget.calls:  # rows that were under way have cost something, too
            log.append({"record": "", "failed": True, "spent": budget.state()})


def may_pass(reply: Rollout) -> bool:
    """Whether a reply has no reward for a reason that another attempt may not meet."""
    total = reply.reward.total
    return total.is_missing and total.reason not in LASTING


async def score_records(
    scorer: Scorer,
    records: Mapping[str, RecordedReplies],
    finished: Callable[[str, Sequence[Rollout]], None],
    at_once: int = 64,
    seed: int = 0,
) -> None:
    """Score all records, at most `at_once` under way; `finished` is told of each when all its replies are scored."""
    gate = asyncio.Semaphore(at_once)

    async def one(name: str, record: RecordedReplies) -> None:
        async with gate:
            finished(name, await scorer.rate_all(record.conversations(seed)))

    try:
        async with asyncio.TaskGroup() as tasks:
            for name, record in records.items():
                tasks.create_task(one(name, record))
    except ExceptionGroup as group:
        raise first_of(group) from group


def parse_metrics(given: Sequence[str]) -> dict[str, Any]:
    """Metrics and weights from NAME, NAME=WEIGHT or NAME={…}."""
    import yaml

    out: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        setting = yaml.safe_load(value) if value else 1.0
        if not isinstance(setting, int | float | Mapping) or isinstance(setting, bool):
            raise UserError(f"--metric '{text}' should read NAME=WEIGHT, such as token_amount=-0.0001")
        out[name.strip()] = setting
    return out


def parse_model(text: str | None) -> Any:
    """A model from the command line: a plain name, or {model: …, option: …}."""
    import yaml

    return yaml.safe_load(text) if text and text.lstrip().startswith("{") else text


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """A table of the means and of what is missing, with the reasons."""
    names = list(dict.fromkeys(name for line in lines for name in line["reward"]["means"]))
    rows = [("reward", [line["reward"]["total"] for line in lines])]
    rows += [(name, [line["reward"]["means"].get(name, {"missing": "not scored"}) for line in lines]) for name in names]
    out = [f"{'':<24}{'mean':>10}{'valid':>8}{'missing':>9}"]
    for name, scores in rows:
        values = [score["value"] for score in scores if "value" in score]
        mean = f"{sum(values) / len(values):10.4f}" if values else f"{'-':>10}"
        out.append(f"{name:<24}{mean}{len(values):>8}{len(scores) - len(values):>9}")
    totals = [line["reward"]["total"] for line in lines]
    out += [f"  missing {told}" for told in tell_missing(map(Score.from_dict, totals))]
    return "\n".join(out)
