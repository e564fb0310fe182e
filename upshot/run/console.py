"""Telling a person what a run does: a bar and a live table on a terminal, plain lines elsewhere, JSON for scripts."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

SHOWN = (
    "reward/mean", "reward/extrinsic", "reward/intrinsic", "reward/missing", "loss/", "metric/", "dpo/", "by/",
    "missing/", "policy/kl_to_sampler", "policy/kl_to_reference", "rollout/reply_tokens", "rollout/turns", "eval/",
)  # fmt: skip
"""What the live table shows, in this order; metrics.jsonl has everything. Times are in the line below it."""

SILENCE_S = 20.0
"""How long a log may be silent within a step."""
STEP_PARTS = ("sample", "futures", "judges", "eval", "learn", "save")


class Reporter:
    """Told of phases, steps and messages; says nothing."""

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """A phase of `total` steps begins (or goes on after `done`)."""

    def step(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """A step is finished."""

    def show_reply(self, step: int, heard: str, reply: str, reward: str) -> None:
        """A reply of the step, now and then: what it answers, its words, its reward."""

    def show_progress(self, done: int, total: int) -> None:
        """Replies played in the running step."""

    def say(self, text: str) -> None:
        """A line worth reading."""

    def close(self) -> None:
        """The run is over."""


def make_reporter(quiet: bool = False, as_json: bool = False) -> Reporter:
    """The reporter for how the command was called."""
    if quiet:
        return Reporter()
    if as_json:
        return JsonReporter()
    return RichReporter() if sys.stdout.isatty() else PlainReporter()


def whole_console() -> Any:
    """A console that cuts no lines in a pipe or a file, which have no width."""
    from rich.console import Console

    return Console(markup=False, width=None if sys.stdout.isatty() else 10_000)


def shown_metrics(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """The metrics worth a look, in the order of `SHOWN`."""
    return [(key, metrics[key]) for prefix in SHOWN for key in metrics if key.startswith(prefix)]


class JsonReporter(Reporter):
    """One JSON object per step."""

    def step(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step."""
        print(json.dumps({"phase": phase, "step": step, **metrics}), flush=True)


class PlainReporter(Reporter):
    """A line a step, for logs: its numbers, its times, and the time left."""

    def __init__(self) -> None:
        self._total = 0
        self._seconds: deque[float] = deque(maxlen=20)
        """That the last steps took."""
        self._printed = time.monotonic()

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """Announce the phase."""
        self._total = total
        self._seconds.clear()
        self._printed = time.monotonic()
        print(f"{name}: {total} steps" + (f", continuing after step {done}" if done else ""), flush=True)

    def step(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step."""
        self._printed = time.monotonic()
        if "time/step" in metrics:
            self._seconds.append(metrics["time/step"] + metrics.get("time/save", 0.0))
        left = (self._total - step) * statistics.fmean(self._seconds or [0.0])
        kept = [f"{key.removeprefix('by/')}={value:.3g}" for key, value in shown_metrics(metrics)]
        eta = f"ETA {duration(left)}" if left else ""
        parts = [f"{phase} {step}/{self._total}", *kept[:8], step_line(metrics), eta]
        print("  ".join(part for part in parts if part), flush=True)

    def show_progress(self, done: int, total: int) -> None:
        """How far a long step is, so that a log is never silent for long."""
        if time.monotonic() - self._printed >= SILENCE_S:
            print(f"    {done} of {total} replies", flush=True)
            self._printed = time.monotonic()

    def show_reply(self, step: int, heard: str, reply: str, reward: str) -> None:
        """A reply in one line."""
        print(f"    step {step}, {reward}: {one_line(heard, 60)!r} → {one_line(reply, 160)!r}", flush=True)

    def say(self, text: str) -> None:
        """Print the line."""
        print(text, flush=True)


class RichReporter(Reporter):
    """A progress bar and the latest metrics, redrawn in place; `breakpoint()` gets the terminal back."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining

        self._console = Console(markup=False)  # what is said here quotes models and exceptions: '[/INST]' is not markup
        name, note = TextColumn("[bold]{task.description:<14}"), TextColumn("{task.fields[note]}")
        columns = (name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), Remaining(), note)
        self._progress = Progress(*columns, console=self._console)
        self._live = Live(self._progress, console=self._console, refresh_per_second=8)
        self._task: Any = None
        self._previous_hook = sys.breakpointhook
        sys.breakpointhook = self._breakpoint
        self._live.start()

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """A new bar."""
        self._task = self._progress.add_task(name, total=total, completed=done, note="")

    def step(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar, redraw the table."""
        from rich.console import Group
        from rich.text import Text

        self._progress.update(self._task, completed=step, note="")
        self._live.update(Group(self._progress, metrics_table(shown_metrics(metrics)), Text(step_line(metrics), "dim")))

    def show_reply(self, step: int, heard: str, reply: str, reward: str) -> None:
        """A reply above the bar."""
        from rich.text import Text

        self._console.print(Text(f"step {step}, {reward}", "bold"))
        for who, text in (("heard", heard), ("said", reply)):
            self._console.print(Text.assemble((f"  {who}: ", "dim"), one_line(text, 300)))

    def show_progress(self, done: int, total: int) -> None:
        """Replies of the running step."""
        self._progress.update(self._task, note=f"[dim]reply {done}/{total}")

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text)

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._live.stop()
        sys.breakpointhook = self._previous_hook

    def _breakpoint(self, *args: Any, **kwargs: Any) -> Any:
        self._live.stop()
        import pdb

        pdb.Pdb().set_trace(sys._getframe(1))


def one_line(text: str, most: int) -> str:
    """A text on one line without what could act on a terminal, its end left out where it is long."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    shown = " ".join(shown.split())
    return shown if len(shown) <= most else f"{shown[:most]}…"


def duration(seconds: float) -> str:
    """A time for a reader."""
    for size, unit, least in ((3600, "h", 5400), (60, "min", 90)):
        if seconds >= least:
            return f"{seconds / size:.0f} {unit}" if seconds >= 10 * size else f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"


def print_rows(head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> Any:
    """A table on a terminal, whole wherever it goes: words stay as they are. The console, for what stands below it."""
    from rich.table import Table

    table = Table(*head, title=title or None, title_justify="left", show_header=any(head))
    for row in rows:
        table.add_row(*row)
    console = whole_console()
    console.print(table)
    return console


def metrics_table(rows: list[tuple[str, float]]) -> Any:
    """The metrics as a table of two pairs of columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2))
    pairs, half = [(Text(name, "dim"), f"{value:.4g}") for name, value in rows], -(-len(rows) // 2)
    for left, right in zip_longest(pairs[:half], pairs[half:], fillvalue=("", "")):
        table.add_row(*left, *right)
    return table


def step_line(metrics: Mapping[str, float]) -> str:
    """Where a step's time, tokens, memory and money went, in one line; what a step does not tell is left out."""
    parts = [f"{name} {seconds:.3g}" for name in STEP_PARTS if (seconds := metrics.get(f"time/{name}", 0.0)) >= 0.0005]
    step = metrics.get("time/step")
    time = f"{step:.3g} s" + (f" ({', '.join(parts)})" if parts else "") if step is not None else ""
    missing = sum(value for name, value in metrics.items() if name.startswith("missing/"))
    dollars = metrics.get("time/dollars", 0.0)
    rates = [f"{_short(metrics[key])} {n}" for n in ("sampled", "learned") if (key := f"time/{n}_per_s") in metrics]
    mfu = f", MFU {metrics['time/mfu']:.0%}" if "time/mfu" in metrics else ""
    sentences = (
        time,
        (f"tokens/s {', '.join(rates)}{mfu}" if rates else ""),
        f"{metrics['time/memory_gib']:.1f} GiB" if "time/memory_gib" in metrics else "",
        f"{missing:.0f} missing" if missing else "",
        f"${dollars:.2f}" if dollars else "",
    )
    return " · ".join(part for part in sentences if part)


def _short(number: float) -> str:
    return f"{number / 1000:.3g}k" if number >= 1000 else f"{number:.3g}"
