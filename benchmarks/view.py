"""How fast the page opens on a run of many rollouts, and how much memory its server takes.

    python benchmarks/view.py [--rollouts 100000]

Prints the seconds until the first conversation can be read in Chromium, until all replies are in the list, and for a
search for a rare word, and the server's memory. The peer is reading the same file with `json.loads` line by line.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from upshot.run.folder import RunFolder

STEP = 64
"""Replies of a step."""
WORDS = [
    *(
        "the",
        "tent",
        "should",
        "be",
        "large",
        "and",
        "blue",
        "by",
        "Friday",
        "please",
        "which",
        "colour",
        "size",
        "day",
    ),
    *("would", "you", "like", "here", "is", "a"),
]


def make_reply(rng: random.Random, number: int) -> dict[str, Any]:
    """A reply with two futures, about as long as a chat's."""

    def text(words: int) -> str:
        return " ".join(rng.choices(WORDS, k=words))

    def message(role: str, words: int, trained: bool = False) -> dict[str, Any]:
        return {"role": role, "content": text(words), "trained": trained, "tokens": words}

    step, group, index = number // STEP + 1, number // 8 % 8, number % 8
    value = round(rng.random(), 4)
    scores = {"verifier": {"value": float(value > 0.5)}, "token_amount": {"value": 80.0}}
    future = {"shared": 2, "by": "user", "turn": 0, "cut": 0, "ended": "answered", "missing": None, "scores": scores}
    return {
        "step": step,
        "row": f"goal/{step}/{group}",
        "goal": text(20),
        "reference": text(10),
        "group": group,
        "key": f"goal/{step}/{group}#{index}",
        "messages": [message("user", 30), message("assistant", 80, True)],
        "futures": [
            {**future, "key": f"f{n}", "messages": [message("user", 20), message("assistant", 60)]} for n in range(2)
        ],
        "reward": {
            "total": {"value": value},
            "terms": {"verifier": {"value": value}},
            "means": {"verifier": {"value": value}, "token_amount": {"value": 80.0}},
            "parts": {"main": {"value": value}},
        },
        "credit": [{"start": 30, "stop": 110, "parts": ["main"], "advantage": round(value - 0.5, 4)}],
        "groups": {"opening": rng.choice(["ambiguous", "unambiguous"])},
    }


def make_run(folder: Path, rollouts: int) -> None:
    """A run folder of this many rollouts."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text("name: many\nseed: 0\n")
    (folder / "status.json").write_text(json.dumps({"state": "finished", "seconds": 3600.0}))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, rollouts // STEP + 1):
            row = {"phase": "rl", "step": step, **{f"group{n % 5}/metric{n}": rng.random() for n in range(50)}}
            file.write(json.dumps(row | {"reward/mean": rng.random()}) + "\n")
    for start in range(0, rollouts, STEP):
        replies = [make_reply(rng, number) for number in range(start, min(rollouts, start + STEP))]
        if start <= rollouts // 2 < start + STEP:
            replies[0]["messages"][0]["content"] += " xylophone"
        RunFolder(folder).append_rollouts(replies)
        RunFolder(folder).write_index()


def memory_mb(pid: int) -> float:
    """The most memory that a process has taken."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def visit(address: str, rollouts: int) -> dict[str, float]:
    """Seconds from the address to a conversation, to the whole list, and for a search."""
    from playwright.sync_api import sync_playwright

    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=flags)
        page = browser.new_page()
        began = time.monotonic()
        page.goto(f"{address}#conversations")
        page.wait_for_selector(".reading .turn.trained", timeout=120_000)
        first = time.monotonic() - began
        page.get_by_text(f"{rollouts:,} replies").first.wait_for(timeout=300_000)
        whole = time.monotonic() - began
        began = time.monotonic()
        page.fill(".controls .search", "xylophone")
        page.get_by_text("1 prompt group, 1 reply").wait_for(timeout=120_000)
        found = time.monotonic() - began
        browser.close()
    return {"first conversation": first, "whole list": whole, "search": found}


def main() -> None:
    """Make the run, serve it, visit it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=100_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "many"
        make_run(run, args.rollouts)
        log = run / "rollouts.jsonl"
        print(f"{args.rollouts:,} rollouts, {log.stat().st_size / 1e6:.0f} MB")
        began = time.monotonic()
        with log.open("rb") as file:
            for line in file:
                json.loads(line)
        peer = time.monotonic() - began
        began = time.monotonic()
        command = [sys.executable, "-m", "upshot.cli", "view", str(run), "--no-open"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            print(f"server up             {time.monotonic() - began:6.2f} s")
            for name, seconds in visit(address, args.rollouts).items():
                print(f"{name:<20}  {seconds:6.2f} s   ({seconds / peer:.2f} x json.loads of the file, {peer:.2f} s)")
            print(f"server's memory       {memory_mb(server.pid):6.0f} MB")
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
