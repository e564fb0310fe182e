"""`upshot eval judge FILE`: the judge is judged against labelled conversations."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.core.files import check_writable, write_jsonl
from upshot.core.score import tell_missing

DESCRIPTION = "How well a judge agrees with labelled conversations."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `upshot eval judge`."""
    parser.add_argument("file", help="labelled conversations: 'messages', 'goal', 'reference' and a label in each row")
    parser.add_argument("--judge", required=True, metavar="MODEL", help="the judge: URL#name, provider/model, folder")
    parser.add_argument(
        "--metric", default="accuracy", help="the judged metric: accuracy, interactivity, judged (accuracy)"
    )
    parser.add_argument("--rubric", help="a rubric template (.j2) instead of the metric's own")
    parser.add_argument("--label", default="label", help="the column with the right rating (label)")
    parser.add_argument("--threshold", type=float, default=0.5, help="from where a rating counts as yes (0.5)")
    parser.add_argument("--limit", type=int, help="judge only the first rows")
    parser.add_argument("--at-once", type=int, default=64, help="rows under way at once (64)")
    parser.add_argument("--out", help="write every verdict to this .jsonl file")


def run(args: argparse.Namespace) -> int:
    """Judge the labelled rows and print the agreement; 1 when nothing could be judged."""
    from upshot.tasks.datasets.files import read_table
    from upshot.tasks.datasets.records import read_replies

    path = Path(args.file)
    if not path.is_file():
        raise UserError(f"no file '{args.file}' with labelled conversations")
    if args.out:
        check_writable(Path(args.out))
    rows = read_table(path)[: args.limit]
    labels = [read_label(row, args.label, number) for number, row in enumerate(rows, 1)]
    records = read_replies(rows)
    scores = asyncio.run(_judge(args, [record.conversations()[0] for record in records]))
    report = agreement(scores, labels, args.threshold)
    print(table(args.metric, report))
    for line in tell_missing(scores):
        print(f"  missing {line}")
    if args.out:
        write_verdicts(Path(args.out), records, scores, labels)
        print(f"written to {args.out}")
    return 0 if report.get("valid") else 1


def read_label(row: Mapping[str, Any], key: str, number: int) -> float:
    """The label of a row as a number; true and false count as 1 and 0."""
    value = row.get(key)
    if isinstance(value, bool | int | float):
        return float(value)
    try:
        return float(str(value))
    except ValueError:
        raise UserError(
            f"row {number}: the label '{key}' is {value!r}; it must be a number (other column: --label)"
        ) from None


async def _judge(args: argparse.Namespace, conversations: Sequence[Any]) -> list[Any]:
    from upshot.offline.score import parse_model
    from upshot.rewards.build import build_metric
    from upshot.rollout.play import score_conversation
    from upshot.rollout.services import assemble

    gate = asyncio.Semaphore(args.at_once)
    options = {"rubric": args.rubric} if args.rubric else {}

    async with assemble(None, {"judge": parse_model(args.judge)}) as services:
        metric = build_metric(args.metric, options, "--metric", judge=services.models["judge"])

        async def one(conversation: Any) -> Any:
            async with gate:
                return (await score_conversation({args.metric: metric}, conversation))[args.metric]

        return list(await asyncio.gather(*(one(conversation) for conversation in conversations)))


def agreement(scores: Sequence[Any], labels: Sequence[float], threshold: float = 0.5) -> dict[str, float]:
    """How the judge's ratings agree with the labels, over the rows it could rate."""
    from upshot.core.score import Score
    from upshot.tasks.verifiers.base import binary_metrics, graded_metrics, valid_pairs

    truths = [Score(label) for label in labels]
    report = binary_metrics(scores, truths, threshold)
    report |= {k: v for k, v in graded_metrics(scores, truths).items() if k not in report}
    pairs = valid_pairs(scores, truths)
    if pairs:
        report["kappa"] = kappa([(p >= threshold, t >= threshold) for p, t in pairs])
        low, high = wilson(report["accuracy"], len(pairs))
        report |= {"accuracy_low": low, "accuracy_high": high}
    return report


def kappa(pairs: Sequence[tuple[bool, bool]]) -> float:
    """Cohen's kappa: agreement beyond chance; 1 when both always say the same one thing."""
    n = len(pairs)
    agree = sum(a == b for a, b in pairs) / n
    first, second = sum(a for a, _ in pairs) / n, sum(b for _, b in pairs) / n
    chance = first * second + (1 - first) * (1 - second)
    return 1.0 if chance == 1 else (agree - chance) / (1 - chance)


def wilson(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share of n."""
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


def table(metric: str, report: Mapping[str, float]) -> str:
    """The report as lines."""
    lines = [f"judge of '{metric}': {report['valid']:g} rows rated, {report['missing']:g} missing"]
    if not report["valid"]:
        return lines[0]
    lines.append(
        f"  agreement   {report['accuracy']:.3f}  (95 %: {report['accuracy_low']:.3f} to {report['accuracy_high']:.3f})"
    )
    for key in ("kappa", "precision", "recall", "tnr", "f1", "correlation", "rmse", "mean_prediction", "mean_truth"):
        if key in report:
            lines.append(f"  {key:<16}{report[key]:.3f}")
    lines.append("  said yes/label yes {tp:g}, no/no {tn:g}, yes/no {fp:g}, no/yes {fn:g}".format(**report))
    return "\n".join(lines)


def write_verdicts(out: Path, records: Sequence[Any], scores: Sequence[Any], labels: Sequence[float]) -> None:
    """One line a row: its id, the label, and what the judge said."""
    judged = zip(records, scores, labels, strict=True)
    write_jsonl(out, ({"row": record.row.id, "label": label, **score.to_dict()} for record, score, label in judged))
