"""Does a run with a new seed land where docs/results.md says? Inside or outside, row by row.

    python docs/check_results.py runs/withheld-1 …          # run folders of `withheld`, or folders with run folders
    python docs/check_results.py --csv runs/withheld-1 …    # lines for results/estimators/evaluations.csv instead

A row's figures are means over n seeds with a 95 % interval of the mean; a single new run is expected within that half
width times √(n + 1). Only runs of as many steps as the row's are compared, at their last evaluation and at their worst
from step 40 on. Questions are shown beside the row's lowest and highest seed, without a verdict: these bounds are no
interval. Rows: the estimators with the scripted user (240 steps) or a learned one (120), and two numbers withheld.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parent
DRAWN: dict[str, Any] = runpy.run_path(str(DOCS / "draw_results.py"))
MADE: dict[str, Any] = runpy.run_path(str(DOCS / "draw_estimators.py"))
KINDS, T_95 = MADE["KINDS"], MADE["T_95"]
Run = Mapping[int, Mapping[str, float]]
"""Evaluations of one run by step."""


def run_folders(paths: Sequence[str]) -> Iterator[Path]:
    """The run folders of `withheld` among these folders and what is directly in them."""
    for path in map(Path, paths):
        for folder in (path, *sorted(path.glob("*"))):
            if (folder / "recipe.yaml").is_file() and (folder / "metrics.jsonl").is_file():
                yield folder


def row_of(recipe: Mapping[str, Any]) -> tuple[str, str]:
    """The name that evaluations.csv has for a recipe's row: estimator and credit."""
    train = recipe["train"]
    estimator = train["method"] if train["method"] != "rl" else train["advantage"]["name"].replace("-", "")
    world = "user-" if "user" in recipe["models"] else "two-" if recipe["task"].get("most_withheld") == 2 else ""
    return world + estimator, recipe["credit"]["by"]


def read_run(folder: Path) -> Run:
    """The columns of evaluations.csv, by step."""
    run: dict[int, dict[str, float]] = {}
    for step, line in DRAWN["evaluations"](folder / "metrics.jsonl"):
        run[step] = {"tokens": line["eval/metric/token_amount"]}
        for kind in KINDS:
            names = {kind: "metric/verifier", f"asks_{kind}": "metric/asks", f"reward_{kind}": "reward"}
            run[step] |= {column: line[f"eval/by/opening={kind}/{name}"] for column, name in names.items()}
    return run


def compare(run: Run, row: Mapping[str, Run]) -> Iterator[str]:
    """A line for every figure of the row: the run's, the bounds, inside or outside."""
    last = max(next(iter(row.values())))
    seeds_of_row = [MADE["figures_of"](each, last) for each in row.values()]
    for name, figure in MADE["figures_of"](run, last).items():
        low, high = MADE["expected"]([seed[name] for seed in seeds_of_row])
        verdict = "inside" if low <= round(figure, 2) <= high else "OUTSIDE"
        yield f"{name:<28} {figure:.2f}   {low:.2f} to {high:.2f}   {verdict}"
    for kind in KINDS:
        seeds = MADE["_range"]([each[last][f"asks_{kind}"] for each in row.values()])
        yield f"{f'asks, {kind}':<28} {run[last][f'asks_{kind}']:.2f}   (seeds of the row: {seeds})"


def main(words: Sequence[str]) -> int:
    """Print; 1 if a figure is outside."""
    kept, outside = MADE["read_evaluations"](), 0
    for folder in run_folders([word for word in words if word != "--csv"]):
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text("utf-8"))
        if recipe["task"]["name"] != "withheld" or not (recipe["eval"] or {}).get("every"):
            continue
        key, run = row_of(recipe), read_run(folder)
        if "--csv" in words:
            columns = [*KINDS, *(f"asks_{kind}" for kind in KINDS), "tokens", *(f"reward_{kind}" for kind in KINDS)]
            for step, line in run.items():
                print(*key, recipe["seed"], step, *(f"{line[column]:.4f}" for column in columns), sep=",")
            continue
        row = kept[key]
        print(f"{' '.join(key)}, seed {recipe['seed']} ({folder.name})")
        steps = max((max(each) for each in row.values()), default=0)
        if len(row) not in T_95 or str(recipe["seed"]) in row or steps not in run:
            print(f"    not compared: the row's seeds are {', '.join(row)}, and it has {steps} steps")
            continue
        lines = list(compare(run, row))
        outside += sum("OUTSIDE" in line for line in lines)
        print(*(f"    {line}" for line in lines), sep="\n")
    return int(outside > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
