"""`upshot score FILE`: rewards of conversations on disk, with a summary that counts what is missing and why.

Results go to OUT, one line per reply; OUT.log beside it holds the settings and the spending.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upshot.api.reward import open_scorer
from upshot.api.settings import METRICS
from upshot.config.registry import import_thing
from upshot.core.files import read_jsonl
from upshot.core.score import LASTING, Score, describe_missing
from upshot.offline.arguments import read_metrics, read_model, read_rows
from upshot.offline.job import Job, Journal, name_row, open_log
from upshot.rewards.build import ARROW
from upshot.tasks.datasets.records import RecordedReplies, read_replies

FUTURES = ("rounds", "samples", "max_tokens", "temperature", "system")
SETTINGS = (*FUTURES, "tokenizer", "max_reply_tokens", "overlong", "task")


def run(args: argparse.Namespace) -> int:
    """Score all replies without a result; 0 if every reply has a reward, 1 if some are missing."""
    rows = read_rows(args.file, args.limit)
    records = read_replies(rows, futures=args.rounds > 0)
    work = {name_row(record.row.id, row): record for record, row in zip(records, rows, strict=True)}
    out = Path(args.out or f"{args.file}.scores.jsonl")
    settings = _settings(args)
    with open_log(out, {**settings, "seed": args.seed, **_own_code(settings["metrics"])}) as log:
        done = find_finished(read_jsonl(out), work)
        with Journal(out, keep=lambda line: line["record"] in done) as results:
            if done:
                print(f"{len(done)} of {len(work)} rows are in {out} already")
            asyncio.run(_score(Job("rows", args, log, results), settings, work, done))
    lines = read_jsonl(out)
    print(summary(lines))
    print(f"written to {out}")
    return 1 if any(line["reward"]["total"].get("missing") for line in lines) else 0


def find_finished(lines: Sequence[Mapping[str, Any]], work: Mapping[str, RecordedReplies]) -> set[str]:
    """The rows whose replies all have a line that another attempt could not improve."""
    settled = Counter(line["record"] for line in lines if not _may_pass(Score.from_dict(line["reward"]["total"])))
    return {name for name, record in work.items() if settled[name] == len(record.conversations())}


def _may_pass(total: Score) -> bool:
    """Whether a reward is missing for a reason that may not occur again."""
    return total.is_missing and total.reason not in LASTING


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the results depend on, as arguments of `open_scorer`."""
    return {
        "metrics": read_metrics(args.metrics) or METRICS,
        **{name: getattr(args, name) for name in SETTINGS},
        "user_options": {"persona": args.persona, "vagueness": args.vagueness},
        **{role: getattr(args, role) and read_model(getattr(args, role)) for role in ("policy", "user", "judge")},
    }


def _own_code(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Hashes of the files of the user's own metrics: results of an older version must not be mixed with new ones."""
    digests = {}
    for name in metrics:
        path = name.split(ARROW)[-1].strip()
        if ":" in path:
            file = inspect.getsourcefile(import_thing(path, "metric", "--metric"))
            digests[name] = hashlib.blake2b(Path(file).read_bytes() if file else b"", digest_size=8).hexdigest()
    return {"code": digests} if digests else {}


async def _score(job: Job, settings: Mapping[str, Any], work: Mapping[str, RecordedReplies], done: set[str]) -> None:
    todo = [name for name in work if name not in done]
    if not todo:
        return
    async with open_scorer(**settings, sandbox=job.args.sandbox, budget=job.budget) as scorer:

        async def one(name: str) -> None:
            replies = await scorer.score_all(work[name].conversations(job.args.seed))
            failure = next((str(r.reward.total.reason) for r in replies if _may_pass(r.reward.total)), None)
            job.write(*({**reply.to_dict(0), "record": name} for reply in replies), failure=failure)

        await job.run(todo, one, len(done))


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """A table of the means and of missing scores, with the reasons."""
    names = list(dict.fromkeys(name for line in lines for name in line["reward"]["means"]))
    rows = [("reward", [line["reward"]["total"] for line in lines])]
    rows += [(name, [line["reward"]["means"].get(name, {"missing": "not scored"}) for line in lines]) for name in names]
    out = [f"{'':<24}{'mean':>10}{'valid':>8}{'missing':>9}"]
    for name, scores in rows:
        values = [score["value"] for score in scores if "value" in score]
        mean = f"{sum(values) / len(values):10.4f}" if values else f"{'-':>10}"
        out.append(f"{name:<24}{mean}{len(values):>8}{len(scores) - len(values):>9}")
    out += [f"  missing {line}" for line in describe_missing(Score.from_dict(score) for score in rows[0][1])]
    return "\n".join(out)
