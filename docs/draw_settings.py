"""Tables of docs/results.md on further settings of `withheld`, on number formats, reasoning-gym and a published table.

    python docs/draw_results.py          # calls this file and prints the tables

The evaluations are lines of `results/estimators/evaluations.csv`: `two-` has two numbers withheld, `user-` a learned
user, `sixth-` a sixth seed of the first table, `amb-` only ambiguous openings, `half-` half the learning rate, `f32-`,
`bf16-` and `fp8-` the format of the numbers. `results/estimators/precision.csv` has means over ten training steps,
`recipes.csv` the evaluations of small recipes.
"""

from __future__ import annotations

import csv
import json
import re
import runpy
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
RUNS = DOCS / "results"
ESTIMATORS: dict[str, Any] = runpy.run_path(str(DOCS / "draw_estimators.py"))
interval, markdown, spread, lowest = (ESTIMATORS[name] for name in ("interval", "markdown", "_range", "lowest"))
KINDS: tuple[str, str] = ESTIMATORS["KINDS"]
Run = Mapping[int, Mapping[str, float]]
"""Evaluations of one run by step."""


def read_runs(estimator: str, credit: str = "tree") -> dict[str, Run]:
    """The runs of a setting by seed."""
    runs: dict[str, Run] = ESTIMATORS["read_evaluations"]()[estimator, credit]
    return runs


def read_table(file: str) -> list[dict[str, str]]:
    """The lines of a kept file."""
    with (RUNS / file).open() as lines:
        return list(csv.DictReader(lines))


def other_settings_table() -> str:
    """Two numbers withheld and a learned user: both credits, and the difference paired by seed."""
    worlds = (("two-", 240, "two numbers withheld"), ("user-", 120, "a learned user"))
    settings = [
        (world + name, last, f"{words}, {label}")
        for world, last, words in worlds
        for name, label in ESTIMATORS["ESTIMATORS"].items()
    ]
    names = [*KINDS, *(f"worst {kind}" for kind in KINDS), *(f"asks, {kind}" for kind in KINDS)]
    rows = [["setting", "credit", "after step", *names]]
    for estimator, last, label in settings:
        reply, tree = read_runs(estimator, "reply"), read_runs(estimator)
        for credit, runs in (("reply", reply), ("**tree**", tree)):
            row = [label, credit, str(last)]
            row += [interval([run[last][kind] for run in runs.values()]) for kind in KINDS]
            row += [interval([lowest(run, kind) for run in runs.values()]) for kind in KINDS]
            row += [spread([run[last][f"asks_{kind}"] for run in runs.values()]) for kind in KINDS]
            rows.append(row)
        gains = [interval([tree[seed][last][kind] - reply[seed][last][kind] for seed in reply], "+") for kind in KINDS]
        gains += [interval([lowest(tree[s], kind) - lowest(reply[s], kind) for s in reply], "+") for kind in KINDS]
        rows.append([label, "tree minus reply", str(last), *gains, "", ""])
    return markdown(rows)


def sixth_seed_table() -> str:
    """A new seed beside what the five seeds of its row let expect of it; in bold what lies outside."""
    rows = [["estimator", "credit", *(f"{kind} (expected)" for kind in KINDS), *(f"worst {kind}" for kind in KINDS)]]
    rows[0] += [f"asks, {kind}" for kind in KINDS]
    for (estimator, label), credit in product(ESTIMATORS["ESTIMATORS"].items(), ("reply", "tree")):
        (run,), row = read_runs(f"sixth-{estimator}", credit).values(), read_runs(estimator, credit).values()
        last = max(run)  # the disk was full before the last evaluation of one run
        cells = [label, "**tree**" if credit == "tree" else credit]
        for name, figure in ESTIMATORS["figures_of"](run, last).items():
            low, high = ESTIMATORS["expected"]([ESTIMATORS["figures_of"](each, last)[name] for each in row])
            shown = f"{figure:.2f}" if low <= round(figure, 2) <= high else f"**{figure:.2f}**"
            cells.append(f"{shown} ({low:.2f} to {high:.2f})")
        rows.append([*cells, *(f"{run[last][f'asks_{kind}']:.2f}" for kind in KINDS)])
        rows[-1][1] += "" if last == ESTIMATORS["LAST"] else f", step {last}"
    return markdown(rows)


RECIPES = {
    "shop": {"score": "right final state"},
    "classmate-mini": {"score": "right answer", "classmate": "classmate, from the thought", "f1": "monitor F1"},
    "gsm8k-multiturn": {"score": "right answer"},
    "gsm8k-turns": {"score": "right answer"},
}
"""What `results/estimators/recipes.csv` has of a recipe, by column."""


def recipes_table() -> str:
    """Estimators over the small recipes, before, midway and after: a figure for every seed."""
    runs: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for line in read_table("estimators/recipes.csv"):
        runs[line["recipe"], line["estimator"]].append(line)
    rows = [["recipe", "estimator", "seeds", "measured on held-out rows", "after SFT", "midway", "after RL"]]
    for (recipe, estimator), lines in runs.items():
        steps = sorted({int(line["step"]) for line in lines})
        seeds = " ".join(dict.fromkeys(line["seed"] for line in lines))
        for column, label in RECIPES[recipe].items():
            cells = [" ".join(f"{float(x[column]):.2f}" for x in lines if int(x["step"]) == step) for step in steps]
            rows.append([f"`{recipe}`", f"`{estimator}`", seeds, label, *cells])
    return markdown(rows)


def dip_table() -> str:
    """Correct answers to ambiguous problems and questions over steps: as it is, and with one thing changed."""
    steps = range(0, 241, 40)
    settings = (
        ("grpo", None, "as in the first table, seeds 21 to 25"),
        ("amb-grpo", None, "only ambiguous openings (`task.ambiguous=1`), seeds 21 to 23"),
        ("grpo", "21", "as in the first table, seed 21"),
        ("half-grpo", "21", "half the learning rate (`train.lr=2.5e-6`), seed 21"),
    )
    rows = [["`grpo` along the tree", *(f"step {step}" for step in steps)]]
    for estimator, seed, label in settings:
        runs = [run for name, run in read_runs(estimator).items() if seed in (None, name)]

        def cell(step: int, runs: Iterable[Run] = tuple(runs)) -> str:
            lines = [run[step] for run in runs if step in run]
            means = (statistics.fmean(line[key] for line in lines) for key in ("ambiguous", "asks_ambiguous"))
            return " / ".join(f"{mean:.2f}" for mean in means)

        rows.append([label, *(cell(step) if step in runs[0] else "" for step in steps)])
    return markdown(rows)


FORMATS = {"f32": "float32", "bf16": "bfloat16", "fp8": "bfloat16, sampled in 8 bits"}


def precision_table() -> str:
    """The same training in three formats: reward over steps, the last evaluation, sampler against learner."""
    blocks = (1, 11, 31, 71, 111)
    names = [*(f"reward, steps {first} to {first + 9}" for first in blocks), *(f"{kind} at step 120" for kind in KINDS)]
    rows = [["numbers", *names, "drift", "largest drift", "KL to the sampler"]]
    lines = read_table("estimators/precision.csv")
    for name, label in FORMATS.items():
        own = [line for line in lines if line["numbers"] == name]
        runs = read_runs(f"{name}-drgrpo").values()

        def two(values: Iterable[float], digits: int = 2) -> str:
            return " ".join(f"{value:.{digits}f}" for value in values)

        rewards = [two(float(line["reward"]) for line in own if line["first_step"] == str(first)) for first in blocks]
        last = [two(run[120][kind] for run in runs) for kind in KINDS]
        drift, kl = (statistics.fmean(float(line[key]) for line in own) for key in ("drift", "kl_to_sampler"))
        largest = max(float(line["drift_max"]) for line in own)
        rows.append([label, *rewards, *last, f"{drift:.4f}", f"{largest:.4f}", f"{kl:.4f}"])
    return markdown(rows)


def reasoning_gym_table() -> str:
    """Four generators before and after RL, on held-out problems and in training."""
    scores: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    training: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in read_table("reasoning-gym/evaluations.csv"):
        step = int(line["step"])
        scores[line["dataset"]][line["seed"]][step] = float(line["score"])
        training[line["dataset"]][step].append(float(line["training_score"]))
    head = ["generator", "after SFT", "after 50 steps", "after 100 steps", "gain, paired by seed"]
    rows = [[*head, "sampled, steps 1 to 10", "sampled, steps 91 to 100"]]
    for dataset, runs in sorted(scores.items()):
        held_out = [interval([run[step] for run in runs.values()]) for step in (0, 50, 100)]
        gain = interval([run[100] - run[0] for run in runs.values()], "+")
        rows.append([f"`{dataset}`", *held_out, gain, *(interval(training[dataset][step]) for step in (0, 100))])
    return markdown(rows)


def reproduce_table(run: str = "table-1-math-hard") -> str:
    """CollabLLM's table 1 with a small model: a check of the chain."""
    kept = json.loads((RUNS / "reproduce" / f"{run}.json").read_text())
    # Without the p-values: so few goals and steps compare nothing. How many scores are missing stays.
    rows = [[re.sub(r" p=[\d.]+\**", "", cell) for cell in row] for row in kept["rows"]]
    return markdown([kept["columns"], *rows])


def reproduce_smollm2_table() -> str:
    """The same with the small model as the user and the judge as well."""
    return reproduce_table("table-1-smollm2")


TABLES = (
    sixth_seed_table,
    other_settings_table,
    dip_table,
    precision_table,
    reasoning_gym_table,
    recipes_table,
    reproduce_table,
    reproduce_smollm2_table,
)


def main() -> None:
    """Print."""
    print(*(table() for table in TABLES), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
