"""Score a file of conversations: concurrent, resumable, with a summary that counts what is missing and why."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from upshot.api import METRICS, Rater, first_of, open_rater
from upshot.errors import UserError
from upshot.models.budget import Budget
from upshot.rewards.records import Record, read_records
from upshot.rollout.reply import Reply
from upshot.tasks.tables import read_table


def score_file(args: argparse.Namespace) -> int:
    """Do what `upshot score` was asked for."""
    path = Path(args.file)
    if not path.is_file():
        raise UserError(f"no file '{args.file}' to score")
    records = read_records(read_table(path)[: args.limit], futures=args.window > 0)
    out = Path(args.out or f"{path}.scores.jsonl")
    done = finished_rows(out)
    todo = [record for record in records if record.row.id not in done]
    if done:
        print(f"{len(records) - len(todo)} of {len(records)} rows are in {out} already")
    asyncio.run(_score(args, todo, out))
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.is_file() else []
    print(summary(lines))
    print(f"written to {out}")
    return 1 if any(line["reward"]["total"].get("missing") for line in lines) else 0


def finished_rows(out: Path) -> set[str]:
    """Ids of the rows that an earlier run wrote; a line cut by a crash is taken away."""
    if not out.is_file():
        return set()
    kept = []
    for line in out.read_text(encoding="utf-8").splitlines():
        try:
            kept.append((json.loads(line)["row"], line))
        except (ValueError, KeyError, TypeError):
            continue
    out.write_text("".join(f"{line}\n" for _, line in kept), encoding="utf-8")
    return {row for row, _ in kept}


async def _score(args: argparse.Namespace, records: Sequence[Record], out: Path) -> None:
    settings = {
        "metrics": parse_metrics(args.metric) or METRICS,
        "window": args.window,
        "samples": args.samples,
        "tokenizer": args.tokenizer,
        "max_reply_tokens": args.max_reply_tokens,
        "overlong": args.overlong,
        "task": args.task,
        "sandbox": args.sandbox,
        "budget": Budget(max_calls=args.max_calls, max_dollars=args.max_dollars),
        "user_options": {"persona": args.persona, "vagueness": args.vagueness},
    }
    settings |= {role: parse_model(getattr(args, role)) for role in ("policy", "user", "judge")}
    if not records:
        return
    async with open_rater(**settings) as rater:
        with out.open("a", encoding="utf-8") as lines:
            await score_records(rater, records, lines, args.at_once, args.seed)


async def score_records(
    rater: Rater, records: Sequence[Record], lines: TextIO, at_once: int = 64, seed: int = 0
) -> None:
    """Score all records, at most `at_once` under way; a record's lines are written together when it is done."""
    gate = asyncio.Semaphore(at_once)

    async def one(record: Record) -> None:
        async with gate:
            replies = await rater.rate_all(record.conversations(seed))
        lines.write("".join(json.dumps(reply.to_dict(0), ensure_ascii=False) + "\n" for reply in replies))
        lines.flush()

    try:
        async with asyncio.TaskGroup() as tasks:
            for record in records:
                tasks.create_task(one(record))
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
    reasons = Counter(line["reward"]["total"].get("missing") for line in lines)
    out += [f"  missing {count} x {reason}" for reason, count in reasons.most_common() if reason]
    return "\n".join(out)


def replies_summary(replies: Sequence[Reply]) -> str:
    """The same table for replies in memory."""
    return summary([reply.to_dict(0) for reply in replies])
