"""Tables and curves of docs/results.md, from the metrics of the runs in docs/results/.

    python docs/draw_results.py          # draws the pictures and prints the tables

This calls `draw_estimators.py` (estimators, credit and TRL) and `draw_settings.py` (further settings, number formats,
reasoning-gym, a published table).

`results/demo/` has the tables of `upshot demo` with five seeds on two kinds of processors; README and the tour show
ranges that hold them all.

A file is one run: the lines of its metrics.jsonl with the keys that are needed here. Runs whose names differ only in
the number after the last dash are seeds of one setting.
"""

from __future__ import annotations

import json
import math
import runpy
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
RUNS = DOCS / "results"
T_95 = {2: 12.71, 3: 4.30}
"""Student's t for a 95 % interval of the mean, by number of runs."""
AMBIGUOUS, CLEAR = (f"eval/by/opening={kind}" for kind in ("ambiguous", "unambiguous"))
ASKS = "metric/upshot.tasks.withheld:asks"
SETTINGS = {
    "reply": "credit to the reply, on openings",
    "depths": "the same, on prompts of all depths",
    "kl": "the same on openings, KL 0.02",
    "tree2": "**tree**, 2 futures",
    "tree4": "**tree**, 4 futures",
    "inside": "user inside the episode",
}


OTHER_WORLDS = {
    "tworeply": "one or two numbers withheld: credit to the reply",
    "two": "one or two numbers withheld: **tree**",
    "luserreply": "a learned user: credit to the reply (seed 1)",
    "luser": "a learned user: **tree**",
    "dear": "twenty times the price of a token: **tree**",
}
"""Settings of the second table: another task, user or price."""
OTHER_WAYS = {
    "tree2": "all weights, bf16, Dr.GRPO (the first table, cut here)",
    "fp8": "sampled in 8 bits (`model.engine.weights=fp8`)",
    "kv8": "keys and values, too (`model.engine.kv=fp8` with it)",
    "exact": "exact mode (`model.exact=true`; seed 1)",
    "lora": "LoRA (seed 1)",
    "ppo": "PPO (seed 1)",
    "odpo": "online DPO (seed 1)",
    "dpo": "DPO on pairs from the tree (seed 1)",
}
"""Settings of the third table: other ways to learn along the tree."""
WAYS_UNTIL = 120
"""The step that its runs ended at."""
GSM8K = (
    "eval/task/pass@1",
    "eval/task/pass@8",
    "eval/rollout/turns",
    "eval/rollout/reply_tokens",
    "eval/metric/format_errors",
)


def evaluations(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """The evaluations of a run by the step whose model they are of."""
    lines = [json.loads(line) for line in run.read_text().splitlines()]
    found = [(line["step"] - ("reward/mean" in line), line) for line in lines if "eval/reward/mean" in line]
    return sorted(dict(found).items())


def seeds(name: str, folder: str = "withheld") -> list[Path]:
    """The runs of a setting, of seeds 1 to 3."""
    runs = [RUNS / folder / f"{name}-{seed}.jsonl" for seed in (1, 2, 3)]
    return [run for run in runs if run.is_file()]


def interval(values: Sequence[float]) -> str:
    """Mean ± half of the 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.2f} ± {half:.2f}"


def row(name: str, label: str, kind: str = CLEAR, until: int = 1000) -> list[str]:
    """One setting: scores at the end, those of `kind` at their worst after step 40, questions, tokens."""
    ends, worst = [], []
    for run in seeds(name):
        found = [(step, line) for step, line in evaluations(run) if step <= until]
        ends.append(found[-1])
        late = [line for step, line in found if step >= 40]
        worst += [min(line[f"{kind}/reward"] for line in late)] if late else []
    steps = sorted({step for step, _ in ends})
    last = [line for _, line in ends]

    def cell(key: str) -> str:
        return interval([line[key] for line in last])

    return [
        label,
        cell(f"{AMBIGUOUS}/reward"),
        cell(f"{CLEAR}/reward"),
        interval(worst) if worst else "",
        f"{statistics.fmean(line[f'{AMBIGUOUS}/{ASKS}'] for line in last):.2f}",
        f"{statistics.fmean(line[f'{CLEAR}/{ASKS}'] for line in last):.2f}",
        f"{statistics.fmean(line['eval/metric/token_amount'] for line in last):.1f}",
        " to ".join(str(step) for step in dict.fromkeys((steps[0], steps[-1]))),
    ]


def head(worst: str) -> list[list[str]]:
    """The first two lines of a table."""
    names = ["setting", "ambiguous", "unambiguous", f"worst {worst} after step 40", "asks, ambiguous"]
    names += ["asks, unambiguous", "tokens", "after step"]
    return [names, ["---"] * len(names)]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def other_worlds() -> str:
    """The table of other tasks, users and prices, in Markdown."""
    return markdown([*head("ambiguous"), *(row(name, label, AMBIGUOUS) for name, label in OTHER_WORLDS.items())])


def other_ways() -> str:
    """The table of other ways to learn, in Markdown."""
    rows = [row(name, label, AMBIGUOUS, WAYS_UNTIL) for name, label in OTHER_WAYS.items()]
    return markdown([*head("ambiguous"), *rows])


def gsm8k_table() -> str:
    """GSM8K in several turns, before and after, in Markdown."""
    runs = [evaluations(run) for run in seeds("turns", "gsm8k")]
    rows = [["after step", "pass@1", "pass@8", "turns", "tokens", "format errors"], ["---"] * 6]
    for step, _ in runs[0]:
        lines = [dict(run)[step] for run in runs]
        rows.append([str(step), *(interval([line[key] for line in lines]) for key in GSM8K)])
    return markdown(rows)


def classmates_table() -> str:
    """SmolLM2 with a classmate and without, in Markdown."""
    runs = [json.loads(run.read_text()) for run in sorted((RUNS / "classmates").glob("seed-*.json"))]
    rows = [["model", *runs[0]["columns"]], ["---"] * (1 + len(runs[0]["columns"]))]
    for name in runs[0]["models"]:
        rows.append([name, *(interval(values) for values in zip(*(run["models"][name] for run in runs), strict=True))])
    return markdown(rows)


def table() -> str:
    """The table of the task `withheld`, in Markdown."""
    start = [evaluations(run)[0][1] for run in seeds("reply")]
    before = ["after SFT", *(interval([line[f"{kind}/reward"] for line in start]) for kind in (AMBIGUOUS, CLEAR)), ""]
    before += [f"{statistics.fmean(line[f'{kind}/{ASKS}'] for line in start):.2f}" for kind in (AMBIGUOUS, CLEAR)]
    before += [f"{statistics.fmean(line['eval/metric/token_amount'] for line in start):.1f}", "0"]
    return markdown([*head("unambiguous"), before, *(row(name, label) for name, label in SETTINGS.items())])


def quickstart_table() -> str:
    """The quickstart along the tree with two estimators, seed by seed, in Markdown."""
    rows = [["estimator", "opening", "seed 1", "seed 2", "seed 3"], ["---"] * 5]
    for name, estimator in (("tree", "`dr-grpo`"), ("grpo", "`grpo`")):
        last = [evaluations(run)[-1][1] for run in seeds(name, "quickstart")]
        for label, kind in (("ambiguous", AMBIGUOUS), ("unambiguous", CLEAR)):
            rows.append([estimator, label, *(f"{line[f'{kind}/reward']:.3f}" for line in last)])
    return markdown(rows)


DEMO = {
    "warm start": "warm start (demonstrations that mostly guess)",
    "single-reply reward": "single-reply reward (`rounds: 0`)",
    "multiturn-aware reward": "**multiturn-aware reward** (`rounds: 2`)",
}


def demo_tables() -> list[dict[str, Any]]:
    """The tables of `upshot demo` that are kept, of different machines; a cell that was not written down is None."""
    return [json.loads(path.read_text()) for path in sorted((RUNS / "demo").glob("*.json"))]


def demo_ranges(tables: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """By model and column: from the lowest to the highest end of the tables' 95 % intervals, rounded outwards."""
    columns = tables[0]["columns"][1:]
    ranges = {}
    for name in DEMO:
        rows = [cells for table in tables for model, *cells in table["rows"] if model == name]
        ranges[name] = [
            _rounded_outwards([row[at] for row in rows if row[at] is not None], 1 if column == "tokens" else 2)
            for at, column in enumerate(columns)
        ]
    return ranges


def _rounded_outwards(cells: Sequence[dict[str, float]], digits: int) -> tuple[float, float]:
    low = min(cell.get("low", cell["value"]) for cell in cells)
    high = max(cell.get("high", cell["value"]) for cell in cells)
    unit = 10**digits
    return math.floor(low * unit) / unit, math.ceil(high * unit) / unit


def cells_outside(table: dict[str, Any], ranges: dict[str, list[tuple[float, float]]]) -> list[str]:
    """The cells of a demo's table that README's ranges do not hold, in words."""
    outside = []
    for model, *cells in table["rows"]:
        for column, cell, (low, high) in zip(table["columns"][1:], cells, ranges[model], strict=True):
            if cell is not None and not low <= cell["value"] <= high:
                outside.append(f"{model}, {column}: {cell['value']:.3f} is not in {low:g}–{high:g}")
    return outside


def demo_table() -> str:
    """README's table of `upshot demo`, in Markdown: ranges in which a run lands, whatever the machine."""
    tables = demo_tables()
    columns = tables[0]["columns"][1:]
    rows = [["", *columns], ["---"] * (1 + len(columns))]
    for name, ranges in demo_ranges(tables).items():
        digits = [1 if column == "tokens" else 2 for column in columns]
        cells = [f"{low:.{n}f}–{high:.{n}f}" for (low, high), n in zip(ranges, digits, strict=True)]
        rows.append([DEMO[name], *cells])
    return markdown(rows)


def demo_seeds_table() -> str:
    """The multiturn-aware model of the demo, processor by processor, a figure for every seed, in Markdown."""
    kept: dict[str, list[list[Any]]] = {}
    for table in demo_tables():
        kept.setdefault(table["machine"].partition(",")[0], []).append(table["rows"][-1][1:])
    rows = [["processor", *demo_tables()[0]["columns"][1:]]]
    for processor, models in kept.items():
        cells = [[f"{cell['value']:.{1 if cell['value'] > 2 else 2}f}" for cell in cells] for cells in models]
        rows.append([processor, *(" ".join(figures) for figures in zip(*cells, strict=True))])
    return markdown([rows[0], ["---"] * len(rows[0]), *rows[1:]])


def main() -> int:
    """Draw and print."""
    for name in ("draw_estimators.py", "draw_settings.py"):
        runpy.run_path(str(DOCS / name), run_name="__main__")
    tables = (table, other_worlds, other_ways, gsm8k_table, classmates_table, quickstart_table, demo_seeds_table)
    print(*(made() for made in (*tables, demo_table)), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
