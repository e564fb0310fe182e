"""`upshot eval judge FILE`: compares a judge's ratings with labelled conversations."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upshot.core.conversation import Conversation
from upshot.core.errors import UserError
from upshot.core.files import check_writable, write_jsonl
from upshot.core.score import Score, describe_missing
from upshot.offline.arguments import read_model, read_rows
from upshot.offline.job import run_all
from upshot.offline.statistics import wilson
from upshot.rewards.build import build_metric
from upshot.rewards.metric import score_by
from upshot.rollout.services import assemble
from upshot.tasks.datasets.records import read_replies
from upshot.tasks.verifiers.base import binary_metrics, graded_metrics, valid_pairs

RATES = ("kappa", "precision", "recall", "tnr", "f1", "correlation", "rmse", "mean_prediction", "mean_truth")


def run(args: argparse.Namespace) -> int:
    """Judge the labelled rows and print the agreement; 1 if nothing could be judged."""
    if args.out:
        check_writable(Path(args.out))
    rows = read_rows(args.file, args.limit)
    labels = [read_label(row, args.label, number) for number, row in enumerate(rows, 1)]
    records = read_replies(rows)
    scores = asyncio.run(_judge(args, [record.conversations()[0] for record in records]))
    report = agreement(scores, labels, args.threshold)
    print(table(args.metric, report))
    for line in describe_missing(scores):
        print(f"  missing {line}")
    if args.out:
        judged = zip(records, scores, labels, strict=True)
        lines = [{"row": record.row.id, "label": label, **score.to_dict()} for record, score, label in judged]
        write_jsonl(Path(args.out), lines)
        print(f"written to {args.out}")
    return 0 if report.get("valid") else 1


def read_label(row: Mapping[str, Any], key: str, number: int) -> float:
    """The label of a row as a number; true and false count as 1 and 0."""
    try:
        return float(row[key])
    except (KeyError, TypeError, ValueError):
        problem = f"row {number}: the label '{key}' is {row.get(key)!r}; it must be a number (other column: --label)"
        raise UserError(problem) from None


async def _judge(args: argparse.Namespace, conversations: Sequence[Conversation]) -> list[Score]:
    options = {"rubric": args.rubric} if args.rubric else {}
    async with assemble(None, {"judge": read_model(args.judge)}) as services:
        metric = build_metric(args.metric, options, "--metric", judge=services.models["judge"])
        return await run_all(conversations, lambda talk: score_by(metric, talk, args.metric), args.at_once)


def agreement(scores: Sequence[Score], labels: Sequence[float], threshold: float = 0.5) -> dict[str, float]:
    """How the judge's ratings agree with the labels, over the rows it could rate."""
    truths = [Score(label) for label in labels]
    report = binary_metrics(scores, truths, threshold)
    report |= {k: v for k, v in graded_metrics(scores, truths).items() if k not in report}
    pairs = [(rating >= threshold, label >= threshold) for rating, label in valid_pairs(scores, truths)]
    if pairs:
        share = wilson(sum(rated == label for rated, label in pairs), len(pairs))
        report |= {"kappa": kappa(pairs), "accuracy_low": share.low, "accuracy_high": share.high}
    return report


def kappa(pairs: Sequence[tuple[bool, bool]]) -> float:
    """Cohen's kappa: agreement beyond chance; 1 when both always say the same one thing."""
    n = len(pairs)
    agree = sum(a == b for a, b in pairs) / n
    first, second = sum(a for a, _ in pairs) / n, sum(b for _, b in pairs) / n
    chance = first * second + (1 - first) * (1 - second)
    return 1.0 if chance == 1 else (agree - chance) / (1 - chance)


def table(metric: str, report: Mapping[str, float]) -> str:
    """The report as lines."""
    lines = [f"judge of '{metric}': {report['valid']:g} rows rated, {report['missing']:g} missing"]
    if not report["valid"]:
        return lines[0]
    low, high = report["accuracy_low"], report["accuracy_high"]
    lines.append(f"  agreement   {report['accuracy']:.3f}  (95 %: {low:.3f} to {high:.3f})")
    lines += [f"  {key:<16}{report[key]:.3f}" for key in RATES if key in report]
    lines.append("  said yes/label yes {tp:g}, no/no {tn:g}, yes/no {fp:g}, no/yes {fn:g}".format(**report))
    return "\n".join(lines)
