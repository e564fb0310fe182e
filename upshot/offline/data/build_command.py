"""The body of `upshot data build`: open everyone, resume, show progress, write the set."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from upshot.config.sampling import Sampling
from upshot.core.time_limit import call_seconds
from upshot.models.client.budget import Budget
from upshot.offline.data.build import Builder, BuildSettings
from upshot.offline.data.gather import gather, open_task, parse_metrics, rows_of
from upshot.offline.data.journal import Journal
from upshot.offline.data.published import published_rows, push, summarise, write_published
from upshot.rewards.build import metric_configs
from upshot.tasks.collabllm import CollabTask

JOURNAL = "journal.log"


def run(args: argparse.Namespace) -> int:
    """Build, write what is finished even when a budget ran out, and print the summary; 1 when every goal failed."""
    task = open_task(args.task, args.file)
    rows = rows_of(task, args.split)[: args.conversations]
    metrics = parse_metrics(args.metrics, task)
    settings = _settings(args, task)
    budget = Budget(max_calls=args.max_calls, max_dollars=args.max_dollars)
    out = Path(args.out)
    with Journal(out / JOURNAL, _identity(args, settings, metrics)) as journal:
        lines = list(journal.lines)
        if lines:
            budget.restore(max((line["spent"] for line in lines), key=lambda spent: spent["calls"]))

        async def play() -> dict[str, float]:
            call_seconds.set(args.call_seconds)
            short = args.templates == "short"
            specs = {"policy": args.policy}
            people = gather(task, specs, args.user, args.judge, metrics, budget, args.tokenizer, short)
            async with people as services:
                with _progress(len(rows), lines, args.quiet or args.json) as show:

                    def told(line: dict[str, Any]) -> None:
                        lines.append(line)
                        show(line)

                    await Builder(services, settings, journal).run(rows, told)
                return services.stats()

        try:
            stats = asyncio.run(play())
        finally:
            weights = {metric.name: metric.weight for metric in metric_configs(metrics)}
            path = write_published(out, published_rows(rows, lines, weights), list(metrics))
    if args.push:
        push(path, args.push)
    summary = summarise(rows, lines)
    _print({**summary, "spent": budget.state(), "file": str(path)}, stats, args.json)
    return 1 if summary["failed"] and not summary["finished"] else 0


def _settings(args: argparse.Namespace, task: CollabTask) -> BuildSettings:
    return BuildSettings(
        candidates=args.candidates,
        proactive_share=args.proactive_share,
        proactive=args.proactive,
        system_share=args.system_share,
        samples=args.samples,
        rounds=args.rounds,
        max_messages=args.max_messages or task.max_messages,
        sampling=Sampling(args.max_tokens, args.temperature),
        concurrency=args.concurrency,
        seed=args.seed,
    )


def _identity(args: argparse.Namespace, settings: BuildSettings, metrics: dict[str, Any]) -> dict[str, Any]:
    """What must stay the same when a build is resumed; limits, concurrency and the number of conversations need not."""
    names = ("task", "file", "split", "policy", "user", "judge", "tokenizer", "max_tokens", "temperature", "seed")
    numbers = ("candidates", "proactive_share", "proactive", "system_share", "samples", "rounds", "max_messages")
    given = {name: getattr(args, name) for name in names}
    told = {"templates": args.templates} if args.templates != "full" else {}
    return {**given, **{name: getattr(settings, name) for name in numbers}, "metrics": metrics, **told}


@contextmanager
def _progress(goals: int, lines: Sequence[dict[str, Any]], quiet: bool) -> Iterator[Callable[[dict], None]]:
    """A bar of finished conversations on stderr, with the turns beside it; silent when nobody watches."""
    import sys

    if quiet or not sys.stderr.isatty():
        yield lambda line: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        done = sum(bool(line["ended"]) for line in lines)
        job = bar.add_task(f"conversations · {len(lines)} turns", total=goals, completed=done)
        turns = len(lines)

        def told(line: dict[str, Any]) -> None:
            nonlocal turns
            turns += 1
            bar.update(job, advance=int(bool(line["ended"])), description=f"conversations · {turns} turns")

        yield told


def _print(summary: dict[str, Any], stats: dict[str, float], as_json: bool) -> None:
    if as_json:
        print(json.dumps({**summary, "stats": stats}, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", title="data built", title_justify="left", show_header=False)
    for key, value in summary.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v:g}" for k, v in value.items()) or "none"
        table.add_row(key.replace("_", " "), f"{value:.3f}" if isinstance(value, float) else str(value))
    Console(markup=False).print(table)
