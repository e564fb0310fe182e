"""Training only from logs: how much of the gain of training in the real shop do its logs give?

    python benchmarks/logs_shop.py --seed 0 --out /tmp/logs-shop --at-once 4

A weak policy (the recipe `shop` after imitation) answers 10,000 calls, which are logged with their outcomes; all seeds
share the log. Only from the log, a model is fitted to users, outcomes and assistant (`upshot logs prepare
--fit-user`), its validity is measured, and a policy is trained against it (`from-logs`). It is compared with the same
without the penalty that keeps it near the logged assistant (`free`), with each logged prefix used once, however often
it was logged (`once`), and with both (`once-free`); with kto and sft on the log; and with the recipe `shop` itself,
which trains in the real shop. All answer the same held-out calls of the real shop; those trained against the fitted
user do so at each of their checkpoints. Prints a line of JSON. Each stage is kept: the same command continues where it
stopped. `--only eval` compares what exists so far, even while a training run is in progress.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from upshot.tasks.dual.shop import ShopTask

UPSHOT = [sys.executable, "-m", "upshot"]
ROOT = Path(__file__).parent.parent


def call(log: dict[str, float], name: str, *words: str) -> None:
    """Run a stage, and note how long it took."""
    began = time.perf_counter()
    subprocess.run(words, check=True, stdout=sys.stderr)
    log[name] = round(time.perf_counter() - began, 1)


def train(log: dict[str, float], run: Path, *words: str) -> None:
    """Train into a run folder: from the beginning, continued, or not at all if it is finished."""
    status = run / "status.json"
    if status.is_file() and json.loads(status.read_text()).get("state") == "finished":
        return
    begun = any(run.glob("checkpoints/*/state.json"))
    own = ["--resume", str(run)] if begun else [*words, f"run_dir={run}"]
    call(log, run.name, *UPSHOT, "train", *own, "--quiet")


def keep_once(rows: Path, out: Path) -> Path:
    """The rows without those whose words occurred before."""
    table, seen, kept = parquet.read_table(rows), set[str](), list[int]()
    for number, row in enumerate(table.select(["prompt"]).to_pylist()):
        words = json.dumps(row["prompt"])
        kept += [number] * (words not in seen)
        seen.add(words)
    parquet.write_table(table.take(kept), out)
    return out


def by_kind(lines: Path) -> dict[str, dict[str, float]]:
    """The share of each kind of call that each policy solved."""
    kinds = {row.id: row.meta["kind"] for row in ShopTask().rows("test")}
    scores: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    for line in map(json.loads, lines.read_text().splitlines()):
        if (value := line.get("scores", {}).get("verifier", {}).get("value")) is not None:
            scores[line["model"]][kinds[line["row"]]].append(value)
    return {
        model: {kind: round(sum(values) / len(values), 2) for kind, values in sorted(own.items())}
        for model, own in scores.items()
    }


def main() -> None:
    """All stages of one seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--fit-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=64, help="in the simulation")
    parser.add_argument("--every", type=int, default=16, help="steps between its evaluations in the real shop")
    parser.add_argument("--goals", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=1, help="trainings side by side")
    parser.add_argument("--trainings", default="real,from-logs,free,once,once-free,kto,sft", help="which of these")
    parser.add_argument("--only", choices=("train", "eval"), help="eval: train nothing, compare what there is")
    args = parser.parse_args()
    out, seconds, seed = args.out / f"seed-{args.seed}", dict[str, float](), f"seed={args.seed}"
    out.mkdir(parents=True, exist_ok=True)
    log, weak, prepared = args.out / "shop.jsonl", args.out / "weak", out / "prepared"
    small = ["--base", "tiny", "--max-tokens", "10", "--rounds", "5", "--samples", "4", "--replies", "200"]
    small += ["--steps", str(args.fit_steps), "--seed", str(args.seed), "--out", str(prepared), "--quiet"]
    fitted = f"model.path={prepared / 'fitted'}"
    marked, good = (f"train.data={prepared / f'{name}_train.parquet'}" for name in ("kto", "sft"))
    short = ["train.steps=40", "train.prompts_per_step=64", seed]
    simulated = [f"train.steps={args.steps}", f"train.save={{every: {args.every}, keep: 99}}", "eval.every=0", seed]
    wanted = args.trainings.split(",")
    if args.only != "eval":
        train(seconds, weak, "shop", "train.steps=0", "eval.every=0")
        made = ["--conversations", str(args.conversations), "--out", str(log)]
        call(seconds, "log", sys.executable, str(ROOT / "examples/shop_logs.py"), "--run", str(weak), *made)
        with ThreadPoolExecutor(args.at_once) as pool:
            real = ["real"] * ("real" in wanted)
            runs = [pool.submit(train, seconds, out / name, "shop", "eval.every=0", seed) for name in real]
            if not (prepared / "recipe.yaml").is_file():
                call(seconds, "prepare", *UPSHOT, "logs", "prepare", str(log), "--fit-user", *small)
            recipe, once = str(prepared / "recipe.yaml"), keep_once(prepared / "rl_train.parquet", out / "once.parquet")
            ways = {
                "from-logs": [recipe, *simulated],
                "free": [recipe, "train.kl=0", *simulated],
                "once": [recipe, f"task.train_file={once}", *simulated],
                "once-free": [recipe, "train.kl=0", f"task.train_file={once}", *simulated],
                "kto": ["kto", fitted, marked, "train.lr=0.0005", *short],
                "sft": ["sft", fitted, good, "train.lr=0.001", *short],
            }
            runs += [pool.submit(train, seconds, out / name, *ways[name]) for name in ways if name in wanted]
            for run in runs:
                run.result()
    if args.only == "train":
        return
    models = {"weak": weak, "fitted": prepared / "fitted", **{name: out / name for name in ("kto", "sft", "real")}}
    for name in ("from-logs", "free", "once", "once-free"):
        kept = sorted((out / name / "checkpoints").glob("rl-*[1-9]*"))
        models |= {f"{name}-{int(path.name.removeprefix('rl-'))}": path for path in kept}
    models = {name: run for name, run in models.items() if any(run.rglob("state.json"))}
    who = ",".join(f"{model}={run}" for model, run in models.items())
    table = ["--goals", str(args.goals), "--out", str(out / "table"), "--quiet", "--json"]
    call(seconds, "eval", *UPSHOT, "eval", "shop", "--models", who, *table)
    cells = json.loads((out / "table/table.json").read_text())["cells"]
    line = {"seed": args.seed, "solved": {model: own["verifier"] for model, own in cells.items()}}
    line["by_kind"] = by_kind(out / "table/rollouts.jsonl")
    if (prepared / "validity.json").is_file():
        line["validity"] = json.loads((prepared / "validity.json").read_text())
    line["seconds"] = seconds
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
