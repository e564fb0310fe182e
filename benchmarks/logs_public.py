"""Public logs from end to end: what `upshot logs` reads in them, a user fitted to them, its realism and validity.

    python benchmarks/logs_public.py --data FOLDER --out /tmp/public camrest sgd taskmaster tau rated

FOLDER has a folder for each set, with its files as they are published: `camrest` (CamRest676.json), `sgd` (dialogues of
Schema-Guided Dialogue), `taskmaster` (TM-4-2024/data), `rated` (reward/ of Taskmaster 3 and 4) and `tau`
(historical_trajectories of tau-bench). Three are rewritten: CamRest676 has a user's and a system's words in each turn;
a rated reply of Taskmaster stands beside its context, both as text; of tau-bench only what was spoken is kept, because
its policy and its tools' answers are too long for a CPU. Each user is a new tiny model. Prints a line of JSON for each
set. The same command continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SETS = {
    "camrest": ("--outcome finished", "--held-out 0.2 --steps 60 --samples 4 --rounds 3"),
    "sgd": ("", "--steps 20"),
    "taskmaster": ("", "--steps 60"),
    "rated": ("--roles api=tool", "--steps 20 --samples 2 --rounds 1"),
    "tau": ("--customer task_id", "--held-out 0.5 --steps 10 --samples 2 --rounds 2 --replies 100"),
}
"""How each set is read, and how it is prepared: tau-bench's tasks are its customers, four conversations each."""
TINY = "--fit-user --base tiny --max-tokens 30 --quiet"


def camrest(record: dict[str, Any]) -> dict[str, Any]:
    """A conversation of CamRest676."""
    said = [
        pair
        for turn in record["dial"]
        for pair in (("user", turn["usr"]["transcript"]), ("assistant", turn["sys"]["sent"]))
    ]
    messages = [{"role": role, "content": text} for role, text in said]
    return {"messages": messages, "finished": record.get("finished")}


def rated(record: dict[str, Any]) -> dict[str, Any]:
    """A rated reply of Taskmaster, as the end of a conversation whose outcome is the rating."""
    said = [*json.loads(record["context"]), json.loads(record["generation"])]
    messages = [
        {"role": one["role"], "content": one.get("text") or one.get("api") or one.get("response")} for one in said
    ]
    return {"messages": messages, "reward": record["reward"], "customer": record["conversation_id"]}


def tau(record: dict[str, Any]) -> dict[str, Any]:
    """A conversation of tau-bench as it was heard: without the policy's text, tool calls and their long answers."""
    spoken = [one for one in record["traj"] if one["role"] in ("user", "assistant") and one["content"]]
    messages = [{"role": one["role"], "content": one["content"]} for one in spoken]
    return {"messages": messages, "reward": record["reward"], "task_id": str(record["task_id"])}


def main() -> None:
    """Look at each set and prepare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=SETS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.sets:
        source = args.data / name
        if convert := {"camrest": camrest, "rated": rated, "tau": tau}.get(name):
            records = [
                record for file in sorted(source.glob("*.json")) for record in json.loads(file.read_text("utf-8"))
            ]
            source = args.out / f"{name}.jsonl"
            source.write_text("".join(json.dumps(convert(record)) + "\n" for record in records), "utf-8")
        reading, sizes = SETS[name]
        line: dict[str, Any] = {"set": name, "seconds": {}}
        for verb, options, out in (("look", "", f"{name}.html"), ("prepare", f"{sizes} {TINY}", name)):
            began = time.perf_counter()
            words = ["logs", verb, str(source), *reading.split(), *options.split(), "--out", str(args.out / out)]
            command = [sys.executable, "-m", "upshot", *words, "--json"]
            line[verb] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            line["seconds"][verb] = round(time.perf_counter() - began, 1)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
