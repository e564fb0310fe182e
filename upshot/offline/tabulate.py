"""`upshot eval`: plays conversations model by model, prints and saves the table, and continues an interrupted one.

A recipe (`evaluate_recipe.py`) or a task with hidden goals (`evaluate.py`) says what is played.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from upshot.core.errors import UserError
from upshot.offline.evaluate import Evaluation
from upshot.offline.evaluate_recipe import RecipeEvaluation
from upshot.offline.job import Job, Journal
from upshot.offline.table import SCALES, TOKENS, Line, make_cells, make_columns, markdown, print_table, table_to_dict
from upshot.rewards.build import metric_labels

Tabulated = Evaluation | RecipeEvaluation
"""Plays the conversations of a table, model by model."""


def run(args: argparse.Namespace) -> int:
    """Play all unfinished conversations, print the table and save it; 1 if a row has no score of the task metric."""
    evaluation: Tabulated = RecipeEvaluation(args) if args.recipe else Evaluation(args)
    models, metrics = list(evaluation.models), [*metric_labels(evaluation.metrics).values()]
    out = Path(args.out or f"eval-{evaluation.name}")
    with (
        Journal(out / "openings.log", evaluation.settings) as openings,
        Journal(out / "rollouts.jsonl", keep=lambda line: line.get("missing") is None) as rollouts,
    ):
        lines = rollouts.lines_of("row", "key", "model", "speaker", "missing", "scores", "groups")
        evaluation.lines = played_before(evaluation, lines)
        stats = asyncio.run(evaluation.play(Job("conversations", args, openings, rollouts)))
    columns = make_columns(metrics, evaluation.lines, evaluation.table_group)
    # Beside a reward of 1.00, a verifier's score must not be shown as 100.
    scales = SCALES if args.task else {TOKENS: SCALES[TOKENS]}
    cells = make_cells(evaluation.lines, models, columns, scales)
    title = f"{evaluation.name}: {len(evaluation.rows)} held-out {'rows' if args.recipe else 'goals'}"
    content = {**table_to_dict(title, columns, cells), "settings": evaluation.settings}
    caveat = evaluation.task.caveat()
    content |= {"models": evaluation.models, "stats": stats, **({"caveat": caveat} if caveat else {})}
    (out / "table.json").write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    (out / "table.md").write_text("\n".join(filter(None, (markdown(columns, cells), caveat))), encoding="utf-8")
    if args.json:
        print(json.dumps(content, ensure_ascii=False))
    else:
        above = f"{caveat}\n" if caveat else ""
        print_table(title, columns, cells, f"{above}saved in {out}; read the transcripts with: upshot view {out}")
    return 0 if all(row[0].estimate is not None for row in cells.values()) else 1


def played_before(evaluation: Tabulated, rollouts: Sequence[Line]) -> list[Line]:
    """The conversations that an earlier run has played; its models must be the same."""
    rows = {row.id for row in evaluation.rows}
    lines = [line for line in rollouts if line["row"] in rows and line["model"] in evaluation.models]
    for line in lines:
        if line["speaker"] != evaluation.speakers[line["model"]]:
            raise UserError(
                f"'{line['model']}' was another model or prompt in the earlier run ({line['speaker']}); "
                f"give the row another name, or use another --out"
            )
    return lines
