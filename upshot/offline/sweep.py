"""`upshot sweep`: trains a recipe with every combination of some values and several seeds, and tabulates the results.

Runs are trained one after another in this process, each in its own folder. A finished run is not repeated; an
interrupted one continues. The result of a setting is the mean over its seeds, with Student's interval: a few seeds are
too few to resample.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshot.config.layers import differences
from upshot.config.load import load_recipe, read_value
from upshot.config.recipe import Recipe
from upshot.core.conversation import derive_seed
from upshot.core.errors import UserError
from upshot.core.files import write_json
from upshot.offline.statistics import student
from upshot.rollout.check_names import check_names
from upshot.run import checks
from upshot.run.console import Reporter, make_reporter, print_rows
from upshot.run.folder import RunFolder, with_whole_paths
from upshot.training.metrics.best import BestTracker

TABLE = "sweep.json"
LONGEST = 60
"""Characters of a value in the name of a folder; a longer one ends in a hash of the whole."""


@dataclass(frozen=True)
class Combination:
    """One combination of values, and its runs."""

    words: tuple[str, ...]
    """The values, as overrides."""
    runs: tuple[tuple[Recipe, Path], ...]
    """One per seed."""

    @property
    def name(self) -> str:
        """Its name in the table."""
        return " ".join(self.words) or "as it is"


def run(args: argparse.Namespace) -> int:
    """Check all recipes, train what is not trained yet, print the table."""
    settings = plan_runs(args.recipe, args.overrides, args.seeds, Path(args.out) if args.out else None)
    for setting in settings:
        check_names(setting.runs[0][0])
    checks.refuse(checks.find(settings[0].runs[0][0], resumed=True))
    out = settings[0].runs[0][1].parent
    print(tell_fixed(args.overrides, args.seeds), file=sys.stderr, end="")
    if args.dry_run:
        for setting in settings:
            print(f"{setting.name}: {', '.join(path.name for _, path in setting.runs)}")
        print(f"{sum(len(setting.runs) for setting in settings)} runs in {out}")
        return 0
    for setting in settings:
        for recipe, path in setting.runs:
            if not (args.quiet or args.json):
                print(f"— {setting.name}, seed {recipe.seed}", flush=True)
            train_one(recipe, path, make_reporter(args.quiet or args.json))
    metrics = args.metric or default_metrics(settings[0])
    table = make_table(settings, metrics)
    write_json(out / TABLE, table)
    if args.json:
        print(json.dumps(table, ensure_ascii=False))
    else:
        print_table(table, f"saved in {out}; look at the runs with: upshot view {out}")
    return 0


def plan_runs(recipe: str, words: Sequence[str], seeds: int, out: Path | None = None) -> list[Combination]:
    """All combinations, each with its seeds and folders; recipes are checked, nothing is made."""
    plain, varied = split_words(words)
    base = load_recipe(recipe, plain, may_idle=True).recipe
    place = out or Path("runs") / f"sweep-{base.name}"
    settings, unread = [], list[list[str]]()
    for combination in itertools.product(*varied):
        runs = []
        for seed in range(base.seed, base.seed + seeds):
            name = "-".join([*(_slug(word) for word in combination), f"seed-{seed}"])
            path = place / name
            overrides = [*plain, *combination, f"seed={seed}", f"run_dir={json.dumps(str(path))}"]
            loaded = load_recipe(recipe, overrides, may_idle=True)
            runs.append((loaded.recipe, path))
            unread.append(loaded.unread())
        settings.append(Combination(tuple(word.replace('"', "") for word in combination), tuple(runs)))
    for message in unread[0]:
        if all(message in others for others in unread):
            raise UserError(message)
    return settings


def split_words(words: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The overrides for all runs, and the varied ones, as a list for each key."""
    plain, varied = [], []
    for word in words:
        key, equals, text = word.partition("=")
        value = read_value(key, text) if equals else None
        if isinstance(value, list):
            if not value:
                raise UserError(f"{key}=[] leaves nothing to try; give at least one value")
            varied.append([f"{key}={json.dumps(one)}" for one in value])
        else:
            plain.append(word)
    return plain, varied


def tell_fixed(words: Sequence[str], seeds: int) -> str:
    """A line about what is the same in all runs, so that nobody expects it to vary; or ''."""
    plain, varied = split_words(words)
    fixed = f"fixed in all runs: {' '.join(plain)}\n" if plain else ""
    if any(len(values) > 1 for values in varied):
        return fixed
    what = "only the seed is varied" if seeds > 1 else "nothing is varied"
    return f"{fixed}{what}; give a key several values as a list, such as train.lr=[1e-4,3e-4]\n"


def _slug(word: str) -> str:
    key, _, value = word.partition("=")
    name = re.sub(r"[^\w.]+", "-", f"{key.rpartition('.')[2]}-{value}").strip("-")
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}-{derive_seed(0, word):016x}"[:LONGEST]


def train_one(recipe: Recipe, path: Path, reporter: Reporter) -> RunFolder:
    """The run in its folder: finished before, resumed, or new."""
    from upshot.run.run import train

    folder = RunFolder(path)
    if not folder.begun:
        return train(recipe, None, reporter)
    for key in differences(with_whole_paths(folder.recipe), with_whole_paths(recipe)):
        raise UserError(f"'{path}' has a run with a different {key}; remove it, or choose another --out")
    return folder if folder.status.get("state") == "finished" else train(folder.recipe, folder, reporter)


def default_metrics(setting: Combination) -> list[str]:
    """The default columns: the evaluated metrics, or else the reward or the loss of the last steps."""
    recipe, path = setting.runs[0]
    folder = RunFolder(path)
    best = BestTracker.from_lines(recipe, ()).metric
    if any(best in line for line in folder.metrics):
        return [best, f"best {best}"]
    last = folder.steps[-1] if folder.steps else {}
    names = [name for name in last if name.startswith(("reward/mean", "loss/", "metric/"))]
    return names[:3] or ["reward/mean"]


def value_of(folder: RunFolder, recipe: Recipe, metric: str) -> float | None:
    """A run's result: an evaluation's last (or `best …`) value; for a step's metric, the mean of its last tenth."""
    name = metric.removeprefix("best ")
    values = [line[name] for line in folder.metrics if line.get(name) is not None]
    if not values:
        return None
    if name != metric:
        return float((min if BestTracker(name).smallest else max)(values))
    return float(values[-1]) if name.startswith("eval/") else statistics.fmean(values[-max(1, len(values) // 10) :])


def make_table(settings: Sequence[Combination], metrics: Sequence[str]) -> dict[str, Any]:
    """Rows of settings, columns of metrics: every value, their mean and interval, and the number of missing values."""
    rows = []
    for setting in settings:
        cells: dict[str, Any] = {}
        for metric in metrics:
            measured = [value_of(RunFolder(path), recipe, metric) for recipe, path in setting.runs]
            values = [value for value in measured if value is not None]
            cells[metric] = {"values": measured, "missing": len(measured) - len(values)}
            if (mean := student(values)) is not None:
                cells[metric] |= mean.to_dict("mean")
        rows.append({"setting": setting.name, "runs": [str(path) for _, path in setting.runs], "metrics": cells})
    return {"metrics": list(metrics), "rows": rows}


def print_table(table: Mapping[str, Any], last: str) -> None:
    """The table on a terminal."""
    rows = [[row["setting"], *(cell_text(row["metrics"][m]) for m in table["metrics"])] for row in table["rows"]]
    console = print_rows(["", *table["metrics"]], rows)
    console.print("mean ± half of the 95 % interval over seeds (Student's t); one seed has none", style="dim")
    console.print(last, highlight=False, soft_wrap=True)


def cell_text(cell: Mapping[str, Any]) -> str:
    """'0.812 ± 0.041 (3)'."""
    absent = f" ({cell['missing']} missing)" if cell["missing"] else ""
    if "mean" not in cell:
        return f"–{absent}"
    n = len(cell["values"]) - cell["missing"]
    half = f" ± {(cell['high'] - cell['low']) / 2:.2g}" if n > 1 else ""
    return f"{cell['mean']:.4g}{half} ({n}){absent}"
