"""`upshot eval`: conversations played model by model, as a table that is printed, saved and gone on with.

What is played is said by a recipe (`evaluate_recipe.py`), or by a task with hidden goals (`evaluate.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from upshot.core.conversation import Row
from upshot.offline.evaluate import Evaluation
from upshot.offline.evaluate_recipe import RecipeEvaluation
from upshot.offline.job import Job, Journal
from upshot.offline.table import Line, make_cells, make_columns, markdown, print_table, table_to_dict
from upshot.rollout.services import Spec


def run(args: argparse.Namespace) -> int:
    """Play what is not played yet, print the table and save it; 1 when a row has no score of the task metric at all."""
    return tabulate(args, RecipeEvaluation(args) if args.recipe else Evaluation(args))


class Tabulated(Protocol):
    """What plays the conversations of a table, model by model."""

    name: str
    models: dict[str, Spec]
    metrics: dict[str, Any]
    rows: list[Row]
    table_group: str | None
    lines: list[Line]

    def settings(self) -> dict[str, Any]:
        """What must stay the same when an evaluation is resumed; models and rows may be added."""
        ...

    def take_up(self, openings: Sequence[Line], rollouts: Sequence[Line]) -> None:
        """Go on behind what an earlier run has played; its rows must be the same models."""
        ...

    async def play(self, job: Job) -> dict[str, float]:
        """Bring all conversations that are not played yet to their end; the counters of models and user."""
        ...


def tabulate(args: argparse.Namespace, evaluation: Tabulated) -> int:
    """Play, print and save."""
    models, metrics = list(evaluation.models), list(evaluation.metrics)
    out = Path(args.out or f"eval-{evaluation.name}")
    with (
        Journal(out / "openings.log", evaluation.settings()) as openings,
        Journal(out / "rollouts.jsonl", keep=lambda line: line["missing"] is None) as rollouts,
    ):
        evaluation.take_up(openings.lines, rollouts.lines)
        stats = asyncio.run(evaluation.play(Job("conversations", args, openings, rollouts)))
    columns = make_columns(metrics, evaluation.lines, evaluation.table_group)
    cells = make_cells(evaluation.lines, models, columns)
    title = f"{evaluation.name}: {len(evaluation.rows)} held-out {'rows' if args.recipe else 'goals'}"
    content = {**table_to_dict(title, columns, cells), "settings": evaluation.settings()}
    content |= {"models": evaluation.models, "stats": stats}
    (out / "table.json").write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    (out / "table.md").write_text(markdown(columns, cells), encoding="utf-8")
    if args.json:
        print(json.dumps(content, ensure_ascii=False))
    else:
        print_table(title, columns, cells, f"saved in {out}; read the transcripts with: upshot view {out}")
    return 0 if all(own[0].estimate is not None for own in cells.values()) else 1
