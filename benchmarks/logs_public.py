"""Public logs from end to end: what `upshot logs` finds in them, a user fitted to them, its realism and validity.

    python benchmarks/logs_public.py --data FOLDER --out /tmp/public camrest sgd taskmaster tau rated
    python benchmarks/logs_public.py --base smollm2-135m --out /tmp/public camrest taskmaster tau calls rated

FOLDER has a folder for each set, with the files as published: `camrest` (CamRest676.json), `sgd` (dialogues of
Schema-Guided Dialogue), `taskmaster` (TM-4-2024/data), `rated` (reward/ of Taskmaster 3 and 4) and `tau`
(historical_trajectories of tau-bench). All but sgd are rewritten to OUT/NAME.jsonl, which is enough without --data:
CamRest676 has a user's and a system's words in each turn. Taskmaster has rated replies with their contexts, both as
text. Of tau-bench, `tau` keeps only what was spoken, because its policy and its tools' answers are too long for a CPU;
`calls` also keeps the tool calls and the first words of their answers. Each user is a new tiny model, or the model of
--base. Prints a line of JSON for each set. The same command continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

READING = {
    "camrest": "--outcome finished",
    "sgd": "",
    "taskmaster": "",
    "rated": "--roles api=tool",
    "tau": "--customer task_id",
    "calls": "--customer task_id",
}
"""How each set is read: tau-bench's tasks are its customers, four conversations each."""
TAU = "--held-out 0.5 --replies 100"
TINY = {
    "camrest": "--held-out 0.2 --steps 60 --samples 4 --rounds 3",
    "sgd": "--steps 20",
    "taskmaster": "--steps 60",
    "rated": "--steps 20 --samples 2 --rounds 1",
    "tau": f"{TAU} --steps 10 --samples 2 --rounds 2",
    "calls": f"{TAU} --steps 10 --samples 2 --rounds 2",
}
LARGER = {
    "camrest": "--held-out 0.2 --steps 150 --samples 8 --rounds 3 --max-tokens 48",
    "sgd": "--steps 200 --max-tokens 48",
    "taskmaster": "--steps 200 --max-tokens 48",
    "rated": "--steps 150 --samples 8 --rounds 2 --max-tokens 64",
    "tau": f"{TAU} --steps 80 --samples 8 --rounds 6 --max-tokens 96",
    "calls": f"{TAU} --steps 80 --samples 8 --rounds 12 --max-tokens 96 --context 4096",
}
"""How each is prepared, on a CPU and with a real model on a GPU."""
ANSWER = 300
"""Characters that are kept of what a tool answers."""


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


def taskmaster(record: dict[str, Any]) -> dict[str, Any]:
    """A conversation of Taskmaster-4, without its annotations."""
    messages = [{"role": one["speaker"], "content": one["text"]} for one in record["utterances"]]
    return {"messages": messages, "vertical": record["vertical"]}


def tau(record: dict[str, Any]) -> dict[str, Any]:
    """A conversation of tau-bench as it was heard: without the policy's text, tool calls and their long answers."""
    spoken = [one for one in record["traj"] if one["role"] in ("user", "assistant") and one["content"]]
    messages = [{"role": one["role"], "content": one["content"]} for one in spoken]
    return {"messages": messages, "reward": record["reward"], "task_id": str(record["task_id"])}


def calls(record: dict[str, Any]) -> dict[str, Any]:
    """The same with tool calls, and with what tools answer, cut."""
    messages = [
        one | {"content": (one["content"] or "")[: ANSWER if one["role"] == "tool" else None]}
        for one in record["traj"]
        if one["role"] != "system"
    ]
    return {"messages": messages, "reward": record["reward"], "task_id": str(record["task_id"])}


def main() -> None:
    """Look at each set and prepare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=READING)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", default="", help="options of prepare that differ from the set's")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    user = ["--fit-user", "--base", args.base, "--seed", str(args.seed), "--quiet"]
    user += ["--max-tokens", "30"] if args.base == "tiny" else []
    for name in args.sets:
        source = args.out / f"{name}.jsonl"
        if name == "sgd":
            source = args.data / name
        elif args.data is not None:
            files = sorted((args.data / ("tau" if name == "calls" else name)).glob("*.json"))
            records = [record for file in files for record in json.loads(file.read_text("utf-8"))]
            convert = {"camrest": camrest, "taskmaster": taskmaster, "rated": rated, "tau": tau, "calls": calls}[name]
            source.write_text("".join(json.dumps(convert(record)) + "\n" for record in records), "utf-8")
        line: dict[str, Any] = {"set": name, "seed": args.seed, "seconds": {}}
        sizes = [*(TINY if args.base == "tiny" else LARGER)[name].split(), *args.sizes.split()]
        for verb, options, out in (("look", [], f"{name}.html"), ("prepare", sizes + user, f"{name}-{args.seed}")):
            began = time.perf_counter()
            words = ["logs", verb, str(source), *READING[name].split(), *options, "--out", str(args.out / out)]
            command = [sys.executable, "-m", "upshot", *words, "--json"]
            line[verb] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            line["seconds"][verb] = round(time.perf_counter() - began, 1)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
