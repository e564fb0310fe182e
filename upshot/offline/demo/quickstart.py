"""The quickstart: one warm start, two kinds of reward, and the table that tells them apart."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from upshot.config.load import dump_recipe, load_recipe
from upshot.config.recipe import Recipe
from upshot.offline.demo.stages import train_stage
from upshot.offline.evaluate.openings import OpeningOutcome, play_openings
from upshot.offline.evaluate.statistics import Estimate, estimate
from upshot.run.reporter import Reporter

ROWS = 600
"""Held-out conversations per model."""
ROUNDS = 4
"""User turns after which a held-out conversation is cut."""
STAGES = ("warm start", "single-reply reward", "multiturn-aware reward")
COLUMNS = ("model", "score, ambiguous", "score, unambiguous", "tokens", "asks, ambiguous", "asks, unambiguous")


def quickstart(
    overrides: Sequence[str], make_reporter: Callable[[], Reporter], quiet: bool = False, as_json: bool = False
) -> int:
    """Train the three models, evaluate them on held-out goals, print the table and the path of the report."""
    started = time.monotonic()
    recipe = load_recipe("quickstart", overrides).recipe
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    root = Path(recipe.run_dir) if recipe.run_dir else Path("runs") / f"demo-{stamp}"
    tell: Callable[[str], None] = (lambda text: None) if quiet or as_json else (lambda text: print(text, flush=True))
    checkpoints = _train_stages(recipe, root, make_reporter, tell)
    tell(f"\nevaluation on {ROWS} held-out openings each")
    outcomes = {name: _evaluate(recipe, path) for name, path in checkpoints.items()}
    table = make_table(outcomes)
    table["note"] += f" Seed {recipe.seed}; {time.monotonic() - started:.0f} s in all."
    (root / "table.json").write_text(json.dumps(table, indent=2))
    (root / "recipe.yaml").write_text(dump_recipe(recipe))
    from upshot.run.report.report import write_report

    page = write_report(root)
    if as_json:
        print(json.dumps(table))
        return 0
    print_table(table)
    print(f"\nreport  {page}\nnext    upshot train quickstart futures.rounds=1    (then: upshot recipe list)")
    return 0


def _train_stages(
    recipe: Recipe, root: Path, make_reporter: Callable[[], Reporter], tell: Callable[[str], None]
) -> dict[str, Path]:
    warm: dict[str, Any] = {"warm_start": recipe.warm_start or {}, "train.steps": 0}
    stages: list[tuple[str, str, dict[str, Any]]] = [
        (STAGES[0], "demonstrations that mostly guess what was left unsaid", warm),
        (STAGES[1], "reinforcement, each reply scored as it stands (0 rounds)", {"futures.rounds": 0}),
        (STAGES[2], f"reinforcement, each reply scored by its futures ({recipe.futures.rounds} rounds)", {}),
    ]
    found: dict[str, Path] = {}
    for number, (name, what, changes) in enumerate(stages, 1):
        tell(f"\n{number}. {name}: {what}")
        folder = root / name.replace(" ", "-")
        found[name] = train_stage(recipe, name, folder, make_reporter(), changes, found.get(STAGES[0]))
    return found


def _evaluate(recipe: Recipe, checkpoint: Path) -> list[OpeningOutcome]:
    """Whole conversations of one model on the test split."""
    from upshot.config.sampling import Sampling
    from upshot.engine.engine import Engine
    from upshot.models.engine_model import EngineModel
    from upshot.models.rendering import Renderer
    from upshot.rewards.metrics.verifier import VerifierMetric
    from upshot.rollout.policy import Policy
    from upshot.tasks.base import tasks
    from upshot.tasks.slots import asked_slots
    from upshot.training.setup import load_policy

    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    module, tokenizer = load_policy(recipe.model, task, 0, str(checkpoint))
    renderer = Renderer(tokenizer)
    model = EngineModel(Engine(module, renderer.end_ids), tokenizer, "policy", renderer)
    policy = Policy(model, renderer, Sampling(recipe.episode.max_tokens, temperature=1.0))
    user = task.user()
    assert user is not None
    play = play_openings(
        task.rows("test")[:ROWS],
        policy,
        user,
        VerifierMetric(task),
        ROUNDS,
        recipe.seed,
        lambda text: bool(asked_slots(text)),
    )
    return asyncio.run(play)


def make_table(outcomes: dict[str, list[OpeningOutcome]]) -> dict[str, Any]:
    """The table as data: one row a model, cells with 95 % intervals."""
    rows = [[name, *(_cell(found) for found in _columns(own))] for name, own in outcomes.items()]
    missing = sum(o.score.is_missing for own in outcomes.values() for o in own)
    note = "Mean over held-out goals with 95 % intervals; score 1 only if the final answer fits the whole goal."
    if missing:
        note += f" {missing} conversations have no score and are left out."
    return {"title": "What the reward looks at decides what is learned", "columns": COLUMNS, "rows": rows, "note": note}


def _columns(outcomes: Sequence[OpeningOutcome]) -> list[Estimate | None]:
    def where(kind: str) -> list[OpeningOutcome]:
        return [o for o in outcomes if o.conversation.row.meta["opening"] == kind and not o.score.is_missing]

    ambiguous, clear = where("ambiguous"), where("unambiguous")
    return [
        estimate([o.score.value or 0.0 for o in ambiguous]),
        estimate([o.score.value or 0.0 for o in clear]),
        estimate([float(o.tokens) for o in [*ambiguous, *clear]]),
        estimate([float(o.asked) for o in ambiguous]),
        estimate([float(o.asked) for o in clear]),
    ]


def _cell(found: Estimate | None) -> Any:
    return "–" if found is None else {"value": found.mean, "low": found.low, "high": found.high}


def print_table(table: dict[str, Any], strong: str = STAGES[2]) -> None:
    """The table on the console, with one row in bold."""
    from rich.console import Console
    from rich.table import Table

    headings = [column.replace(", ", "\n") for column in table["columns"]]
    shown = Table(*headings, title=table["title"], caption=table["note"], padding=(0, 1), collapse_padding=True)
    for name, *cells in table["rows"]:
        texts = [c if isinstance(c, str) else f"{c['value']:.2f}\n[dim]{c['low']:.2f}–{c['high']:.2f}" for c in cells]
        shown.add_row(f"[bold]{name}" if name == strong else name, *texts)
    Console().print(shown)
