"""`upshot eval`: conversations played model by model, as a table that is printed, saved and gone on with.

What is played is said by a recipe (`evaluate_recipe.py`), or by a task with hidden goals (`evaluate.py`).
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
"""What plays the conversations of a table, model by model."""


def run(args: argparse.Namespace) -> int:
    """Play what is not played yet, print the table and save it; 1 when a row has no score of the task metric at all."""
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
    # A verifier's score is not shown as 100 beside a reward of 1.00.
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
    """What an earlier run has played of the table's rows and models, which must be the same models."""
    rows = {row.id for row in evaluation.rows}
    lines = [line for line in rollouts if line["row"] in rows and line["model"] in evaluation.models]
    for line in lines:
        if line["speaker"] != evaluation.speakers[line["model"]]:
            raise UserError(
                f"'{line['model']}' was another model or prompt in the earlier run ({line['speaker']}); "
                f"give the row another name, or use another --out"
            )
    return lines
