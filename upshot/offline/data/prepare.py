"""`upshot data prepare`: candidates from files or the Hub → parquet for sft, rl and dpo, split by goal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from upshot.core.errors import UserError, did_you_mean
from upshot.core.files import check_writable
from upshot.offline.data.select import best_and_worst, best_conversations, distinct_prompts, merge_duplicates
from upshot.run.console import print_rows
from upshot.tasks.datasets.candidates import Candidate, candidate_of, goal_groups
from upshot.tasks.datasets.files import Record, read_tables
from upshot.tasks.datasets.parquet import AGENT_NAME, dpo_row, rl_row, schema_for, sft_row, write_parquet
from upshot.tasks.datasets.splits import split_in_two
from upshot.tasks.verifiers.base import BadRow

T = TypeVar("T")

UNUSED = {"sft": ("sessions",), "dpo": ("sessions",), "rl": ()}
"""Columns of the published sets that a purpose does not need, and that are most of their bytes."""


@dataclass(frozen=True)
class PrepareSettings:
    """How candidates become rows."""

    purpose: str
    """sft, rl or dpo."""
    validation: float = 0.1
    """Share of the goals held out for validation; from 1 on: their number."""
    min_gap: float = 0.1
    """dpo: smallest difference between the scores of chosen and rejected."""
    least: Mapping[str, float] = field(default_factory=dict)
    """sft, dpo: smallest `score`, or mean of a metric, of the reply that is imitated or chosen."""
    system: str | None = None
    """System prompt; None: the record's own, or else `default_system`; '': no prompt."""
    default_system: str = ""
    """System prompt of records without one when `system` is None."""
    source: str = "collabllm"
    """rl: `data_source` of the rows."""
    task_desc: str = ""
    """rl: the task as described to the simulated user."""
    agent_name: str = AGENT_NAME
    """rl: the agent loop that verl runs for the rows."""
    seed: int = 0
    """Which goals are held out."""


@dataclass
class PrepareSummary:
    """How many records were read, written and dropped."""

    purpose: str
    read: int = 0
    """Records in the source."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows written, by split."""
    goals: dict[str, int] = field(default_factory=dict)
    """Distinct goals of those rows, by split."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Records that did not become a row, by reason."""
    files: list[str] = field(default_factory=list)
    profiles: str = ""
    """What the judge can decide of the rows' programs, as a table."""

    def print(self) -> None:
        """How much was read, written and dropped, and why, as a table."""
        rows = [("records read", f"{self.read:,}", "")]
        rows += [(f"written to {split}", f"{n:,}", f"{self.goals[split]:,}") for split, n in self.rows.items()]
        rows += [(f"dropped: {reason}", f"{count:,}", "") for reason, count in self.dropped.most_common()]
        console = print_rows(("", "rows", "goals"), rows, f"data for {self.purpose}")
        for line in (*self.files, *filter(None, [self.profiles])):
            console.print(line, soft_wrap=True, highlight=False)


def prepare(dataset: str, out: Path, settings: PrepareSettings) -> PrepareSummary:
    """Write `{purpose}_train.parquet` and `{purpose}_validation.parquet` under `out`, and say what was dropped."""
    goals = settings.purpose == "rl"  # a goal without messages can be played, but not imitated

    def parse(records: Sequence[Record], dropped: Counter[str]) -> list[Candidate]:
        return merge_duplicates(parse_all(records, lambda record: candidate_of(record, goals), dropped), dropped)

    held_out, without = (settings.validation, settings.seed), UNUSED[settings.purpose]
    summary, splits = read_splits(dataset, out, settings.purpose, parse, goal_groups, *held_out, without)
    metrics = list(dict.fromkeys(name for candidates in splits.values() for c in candidates for name in c.rewards))
    unknown = next((name for name in settings.least if name.removeprefix("rewards.") not in ("score", *metrics)), None)
    if unknown is not None:
        raise UserError(f"no metric '{unknown}' in '{dataset}'; {did_you_mean(unknown, ['score', *metrics])}")
    ranked = any(candidate.score is not None for candidates in splits.values() for candidate in candidates)
    rows = {split: _rows(candidates, split, settings, summary, ranked) for split, candidates in splits.items()}
    write_splits(dataset, out, rows, schema_for(settings.purpose, metrics), summary)
    return summary


def write_splits(
    dataset: str, out: Path, rows: Mapping[str, Sequence[Any]], schema: Any, summary: PrepareSummary
) -> None:
    """One parquet file per split; none for an empty split (many readers fail on it): an earlier run's is removed.

    A source without any training row is refused, with the reasons.
    """
    summary.dropped = +summary.dropped  # without reasons that dropped nothing
    if not rows["train"]:
        reasons = "; ".join(f"{why}: {count}" for why, count in summary.dropped.most_common()) or "it has no records"
        left = " is left for training; all that are left are held out" if any(rows.values()) else ""
        raise UserError(f"no row for {summary.purpose} in '{dataset}'{left} ({reasons})")
    for split, content in rows.items():
        summary.rows[split] = len(content)
        path = out / f"{summary.purpose}_{split}.parquet"
        if content:
            write_parquet(path, content, schema)
            summary.files.append(str(path))
        else:
            path.unlink(missing_ok=True)


def read_splits(
    dataset: str,
    out: Path,
    purpose: str,
    parse: Callable[[Sequence[Record], Counter[str]], list[T]],
    goals: Callable[[Sequence[T]], Sequence[str]],
    validation: float,
    seed: int,
    without: tuple[str, ...] = (),
    goal: str = "goal",
) -> tuple[PrepareSummary, dict[str, list[T]]]:
    """The parsed records of a source, by split: its own validation split if it has one, else some goals are held out.

    Goals of the validation split are removed from train. `without`: columns not to read. `goal`: the word for a goal.
    """
    if not 0 <= validation < float("inf") or (validation > 1 and validation != int(validation)):
        raise UserError(f"validation is {validation}; it is a share of the goals, from 0 to below 1, or their number")
    check_writable(out / f"{purpose}_train.parquet")
    tables = read_tables(dataset, without=without)
    summary = PrepareSummary(purpose, read=sum(map(len, tables.values())))
    parsed = {split: parse(records, summary.dropped) for split, records in tables.items()}
    train, held_out, leaked = split_in_two(parsed, goals, validation, seed)
    if leaked:
        summary.dropped[f"{goal} also in validation"] += leaked
    return summary, {"train": train, "validation": held_out}


def parse_all(records: Sequence[Record], parse: Callable[[Record], T], dropped: Counter[str]) -> list[T]:
    """The parsed records; those that cannot be parsed are counted."""
    parsed = []
    for record in records:
        try:
            parsed.append(parse(record))
        except BadRow as why:
            dropped[str(why)] += 1
    return parsed


def _rows(
    candidates: list[Candidate], split: str, settings: PrepareSettings, summary: PrepareSummary, ranked: bool
) -> list[dict[str, Any]]:
    """The rows of one split, counted in the summary."""

    def system(candidate: Candidate) -> str:
        return settings.system if settings.system is not None else candidate.system or settings.default_system

    chosen: list[Candidate]
    if settings.purpose == "sft":
        chosen = best_conversations(candidates, summary.dropped, ranked, settings.least)
        rows = [sft_row(c, system(c)) for c in chosen]
    elif settings.purpose == "dpo":
        pairs = best_and_worst(candidates, summary.dropped, settings.min_gap, settings.least)
        chosen = [pair.chosen for pair in pairs]
        rows = [dpo_row(pair, system(pair.chosen)) for pair in pairs]
    else:
        chosen = distinct_prompts(candidates, summary.dropped)
        facts = (split, settings.source, settings.task_desc, settings.agent_name)
        rows = [rl_row(c, system(c), number, *facts) for number, c in enumerate(chosen)]
    summary.goals[split] = len({c.goal_key for c in chosen})
    return rows
