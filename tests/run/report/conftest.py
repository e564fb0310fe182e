"""A realistic run folder: three stages, ragged futures, missing scores, hostile text."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STAGES = {"warm-start": "sft", "single-reply": "rl", "multiturn": "rl"}
REASONS = ["judge: timeout", "judge: no JSON in answer", "user: budget"]
HOSTILE = "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 2'> &amp; <!-- %DATA%"
RECIPE = """# resolved
name: quickstart
seed: 1
task:
  name: slots  # recipe
  slots: 3
futures:
  samples: 3  # override
  rounds: 2
reward:
  metrics:
    - name: accuracy
      weight: 1.0
train:
  lr: 3e-4
"""


def message(role: str, content: str, trained: bool = False, **note: Any) -> dict[str, Any]:
    """One logged message."""
    return {"role": role, "content": content, "trained": trained, "tokens": len(content.split()) + 2, "note": note}


def future(rng: random.Random, index: int, good: bool) -> dict[str, Any]:
    """One logged future; some are truncated, some scores are missing."""
    if rng.random() < 0.06:
        return {"key": f"f{index}", "messages": [], "ended": None, "missing": "user: budget", "scores": {}}
    turns = [
        message(
            "user", "the blue one, large, for Friday", thought="I want a large blue tent by Friday. Keep it short."
        ),
        message("assistant", "Booked: large blue tent, Friday." if good else "Here is a small red tent for Monday."),
    ]
    if rng.random() < 0.4:
        turns.append(message("user", "thanks!", thought="Done.", vague=True))
    lost = rng.random() < 0.08
    accuracy: dict[str, Any] = {"missing": rng.choice(REASONS[:2])} if lost else {"value": float(good)}
    tokens = sum(turn["tokens"] for turn in turns)
    judged = {"value": round(0.3 + 0.6 * rng.random(), 3), "detail": {"thought": "It asks before it acts."}}
    scores = {"accuracy": accuracy, "interactivity": judged, "token_amount": {"value": float(tokens)}}
    ended = rng.choice(["goal reached", "rounds"])
    return {"key": f"f{index}", "messages": turns, "ended": ended, "missing": None, "scores": scores}


def reward(futures: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the futures that have a value, weighted and summed; missing if a metric has no value."""
    weights = {"accuracy": 1.0, "interactivity": 0.5, "token_amount": -0.01}
    means: dict[str, Any] = {}
    terms: dict[str, Any] = {}
    for name, weight in weights.items():
        values = [f["scores"][name]["value"] for f in futures if "value" in f["scores"].get(name, {})]
        means[name] = {"value": sum(values) / len(values)} if values else {"missing": f"{name}: no future"}
        terms[name] = {"value": means[name]["value"] * weight} if values else means[name]
    lacking = [term["missing"] for term in terms.values() if "missing" in term]
    total = {"missing": lacking[0]} if lacking else {"value": sum(term["value"] for term in terms.values())}
    sums = {name: term.get("value", 0.0) for name, term in terms.items()}
    intrinsic = sums["token_amount"] + sums["interactivity"]
    return {
        "total": total,
        "terms": terms,
        "parts": {"main": total},
        "means": means,
        "extrinsic": sums["accuracy"],
        "intrinsic": intrinsic,
    }


def reply(rng: random.Random, step: int, group: int, index: int, skill: float) -> dict[str, Any]:
    """One logged reply with its futures and credit."""
    hard = group % 2 == 0
    asks = rng.random() < skill
    said = "Which colour and size would you like, and by when?" if asks else "Booked: small red tent, Monday."
    opening = "I need a tent." if hard else "I need a large blue tent by Friday."
    system = message("system", "You are a shop assistant. Answer in the little language, or ask for what is missing.")
    futures = [future(rng, n, rng.random() < (0.9 if asks or not hard else 0.15)) for n in range(rng.choice([2, 3, 3]))]
    worth = reward(futures)
    value = worth["total"].get("value")
    return {
        "step": step,
        "row": f"goal-{group:03d}",
        "group": group,
        "key": f"s{step}/g{group}/r{index}",
        "messages": [
            system,
            message("user", opening, thought="A tent: large, blue, Friday."),
            message("assistant", said, True),
        ],
        "futures": futures,
        "reward": worth,
        "credit": [
            {"start": 31, "stop": 36, "parts": ["main"], "advantage": None if value is None else round(value - 0.7, 4)},
            {
                "start": 36,
                "stop": 45,
                "parts": ["main", "classmate"],
                "advantage": None if value is None else round(1.2 * (value - 0.6), 4),
            },
        ],
        "groups": {"difficulty": "hard" if hard else "easy"},
    }


def metrics_row(rng: random.Random, context: str, phase: str, step: int, steps: int) -> dict[str, Any]:
    """One logged line of metrics."""
    gain = {"warm-start": 0.1, "single-reply": 0.25, "multiturn": 0.6}[context] * (1 - math.exp(-4 * step / steps))

    def noisy(level: float) -> float:
        return round(level + rng.gauss(0, 0.04), 5)

    row: dict[str, Any] = {"step": step, "phase": phase, "loss/total": noisy(2.5 * math.exp(-3 * step / steps) + 0.3)}
    row |= {"train/lr": 3e-4 * min(1.0, step / 10), "train/grad_norm": abs(noisy(0.8)), "time/step": abs(noisy(0.7))}
    if phase == "rl":
        row |= {
            "reward/mean": None if step in (7, 8) else noisy(0.3 + gain),
            "reward/missing": rng.choice([0, 0, 0, 1]),
            "reward/std": abs(noisy(0.3)),
            "reward/accuracy": noisy(0.25 + gain),
            "reward/token_amount": noisy(-0.2),
            "by/difficulty=hard/reward": noisy(0.1 + gain),
            "by/difficulty=easy/reward": noisy(0.8 + gain / 10),
            **({f"missing/{rng.choice(REASONS)}": rng.choice([1, 2])} if rng.random() < 0.3 else {}),
            "policy/kl": abs(noisy(0.02 * step / steps)),
            "policy/entropy": noisy(2 - gain),
            "question/share": min(1.0, abs(noisy(gain))),
            "time/rollout": abs(noisy(0.4)),
        }
    return row


def write_lines(path: Path, rows: list[dict[str, Any]], tail: str = "") -> None:
    """A .jsonl file, optionally ending as a killed process left it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail, "utf-8")


def make_run(folder: Path, steps: int = 60, groups: int = 4, replies: int = 4, every: int = 10) -> Path:
    """Write the synthetic run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    versions = {
        "upshot": "0.1.0",
        "python": "3.11.7",
        "torch": "2.13.0",
        "transformers": "5.1.0",
        "platform": "linux-aarch64",
    }
    (folder / "versions.json").write_text(json.dumps(versions))
    status = {
        "state": "finished",
        "started": "2026-11-15T10:00:00+00:00",
        "finished": "2026-11-15T10:03:21+00:00",
        "seed": 1,
    }
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "table.json").write_text(json.dumps(TABLE))
    for number, (context, phase) in enumerate(STAGES.items()):
        inner = folder / context
        inner.mkdir(exist_ok=True)
        rng = random.Random(number)
        (inner / "recipe.yaml").write_text(RECIPE.replace("quickstart", f"quickstart-{context}"))
        (inner / "status.json").write_text(
            json.dumps({"state": "finished", "started": 1000.0 + number, "seconds": 61.5})
        )
        write_lines(
            inner / "metrics.jsonl", [metrics_row(rng, context, phase, step, steps) for step in range(1, steps + 1)]
        )
        if phase == "rl":
            skill = 0.15 if context == "single-reply" else 0.8
            logged = [
                reply(rng, step, group, index, skill)
                for step in range(every, steps + 1, every)
                for group in range(groups)
                for index in range(replies)
            ]
            logged[-1]["messages"][1]["content"] = HOSTILE
            write_lines(inner / "rollouts.jsonl", logged, tail='{"step": 60, "mess' if context == "multiturn" else "")
    return folder


THOUGHT = ("3 boxes hold 4 pens each, so 3 * 4 = 12.", " Two are lost, so 12 - 2 = 10.")
PEERS = {"smol": 0.8, "Qwen/Qwen3-0.6B": 0.4}


def classmate_answer(rng: random.Random, key: str, by: str, index: int, right: bool) -> dict[str, Any]:
    """One logged answer of a classmate to the kept thought; sometimes a failed call."""
    base = {"key": f"{key}/{by}/1/{index}", "by": by, "turn": 0, "cut": 1, "span": [23, 37], "ended": None}
    if rng.random() < 0.1:
        return {**base, "messages": [], "missing": "timeout", "scores": {"classmate": {"missing": "timeout"}}}
    said = message(
        "assistant", "So there are 10 pens.\n#### 10" if right else "I think it is 12.\n#### 12", finish="stop"
    )
    verdict = {"value": float(right), "detail": {"answer": "10" if right else "12"}}
    return {**base, "messages": [said], "missing": None, "scores": {"classmate": verdict}}


def classmate_reply(rng: random.Random, step: int, group: int, index: int, skill: float) -> dict[str, Any]:
    """One logged reply with a thought, two classmates x 3 answers, and credit for two parts."""
    key = f"s{step}/g{group}/r{index}"
    right, clear = rng.random() < 0.7, rng.random() < skill
    thought = "".join(THOUGHT) if clear else "Hm hm. 12? 10? zq zq."
    kept, rest = THOUGHT if clear else ("Hm hm. 12? 10?", " zq zq.")
    own = {
        "key": f"{key}/0",
        "by": "",
        "turn": 0,
        "cut": 0,
        "span": None,
        "messages": [],
        "ended": None,
        "missing": None,
    }
    main: dict[str, Any] = {"value": float(right), "detail": {"answer": "10" if right else "9"}}
    answers = [
        classmate_answer(rng, key, by, n, rng.random() < (chance if clear else 0.1))
        for by, chance in PEERS.items()
        for n in range(3)
    ]
    means = {}
    for by in PEERS:
        values = [a["scores"]["classmate"].get("value") for a in answers if a["by"] == by]
        present = [value for value in values if value is not None]
        means[by] = {"value": sum(present) / len(present)} if present else {"missing": "timeout"}
    known = [mean["value"] for mean in means.values() if "value" in mean]
    part = {"value": sum(known) / len(known), "detail": {"classmates": means}} if known else {"missing": "timeout"}
    total = {"value": main["value"] + part["value"]} if known else part
    worth = {"total": total, "terms": {"verifier": main}, "means": {"verifier": main}, "extrinsic": float(right)}
    answer = f"There are {'10' if right else '9'} pens.\n#### {'10' if right else '9'}"
    both = None if not known else round(total["value"] - 1.1, 3)
    edges = [
        (20, 23, "<think>\n", False),
        (23, 37, kept, True),
        (37, 45, rest, False),
        (45, 60, f"</think>\n\n{answer}", False),
    ]
    question = message(
        "user", f"Pens come in 3 boxes of 4, and 2 get lost. How many are left? ({group})\n\nEnd with ####."
    )
    return {
        "step": step,
        "row": f"pens-{group:03d}",
        "group": group,
        "key": key,
        "messages": [question, message("assistant", answer, True, thought=thought)],
        "futures": [{**own, "scores": {"verifier": main}}, *answers],
        "reward": {**worth, "intrinsic": 0.0, "parts": {"main": main, "classmate": part}},
        "credit": [
            {
                "start": start,
                "stop": stop,
                "parts": ["main", "classmate"] if extra else ["main"],
                "advantage": both if extra else round(main["value"] - 0.6, 3),
                "text": text,
            }
            for start, stop, text, extra in edges
        ],
        "groups": {"task": "gsm8k"},
    }


def make_classmate_run(folder: Path, steps: int = 30, every: int = 10) -> Path:
    """A synthetic run folder of classmate training."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text("name: classmate-gsm8k\nfutures: {name: classmates, classmates: [smol]}\n")
    (folder / "status.json").write_text(json.dumps({"state": "finished", "seconds": 90.0}))
    rng = random.Random(7)
    rows = []
    for step in range(1, steps + 1):
        gain = 1 - math.exp(-3 * step / steps)
        row = {"step": step, "phase": "rl", "reward/mean": 0.6 + gain, "reward/missing": 0.0, "reward/group_std": 0.4}
        row |= {"part/main": 0.6 + 0.1 * gain, "part/main/missing": 0.0, "part/classmate": 0.9 * gain}
        row |= {"part/classmate/missing": float(step % 7 == 0), "classmate/score": 0.9 * gain, "classmate/cut": 0.1}
        row |= {"classmate/thought_length": 20 + 5 * gain, "classmate/reply_length": 15.0, "classmate/agreement": 0.7}
        row |= {f"classmate/{name}/score": chance * gain + rng.gauss(0, 0.02) for name, chance in PEERS.items()}
        row |= {f"classmate/{name}/missing": float(rng.random() < 0.1) for name in PEERS}
        rows.append(row)
    write_lines(folder / "metrics.jsonl", rows)
    shown = range(every, steps + 1, every)
    logged = [classmate_reply(rng, s, g, n, 0.2 + 0.7 * s / steps) for s in shown for g in range(3) for n in range(4)]
    write_lines(folder / "rollouts.jsonl", logged)
    return folder


TABLE = {
    "title": "Held-out goals",
    "columns": ["", "task, ambiguous", "task, unambiguous", "tokens", "asks first"],
    "rows": [
        [
            "warm start",
            {"value": 0.214, "low": 0.18, "high": 0.25},
            {"value": 0.902, "low": 0.87, "high": 0.93},
            {"value": 11.2, "low": 11.0, "high": 11.4},
            "9 %",
        ],
        [
            "single-reply reward",
            {"value": 0.261, "low": 0.22, "high": 0.3},
            {"value": 0.951, "low": 0.93, "high": 0.97},
            {"value": 9.8, "low": 9.7, "high": 9.9},
            "2 %",
        ],
        [
            "multiturn-aware reward",
            {"value": 0.873, "low": 0.84, "high": 0.9},
            {"value": 0.944, "low": 0.92, "high": 0.96},
            {"value": 16.1, "low": 15.7, "high": 16.5},
            "91 %",
        ],
    ],
    "note": "600 goals each, 95 % intervals from 2,000 bootstrap samples.",
}


@pytest.fixture
def synthetic_run(tmp_path: Path) -> Path:
    """The synthetic run folder, small."""
    return make_run(tmp_path / "demo-run")


@pytest.fixture
def classmate_run(tmp_path: Path) -> Path:
    """A synthetic run folder of classmate training."""
    return make_classmate_run(tmp_path / "classmate-run")


@pytest.fixture
def run_maker() -> Callable[..., Path]:
    """`make_run`, for tests that need other sizes."""
    return make_run
