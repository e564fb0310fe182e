"""verl's metrics in our run folder."""

from __future__ import annotations

import json
from pathlib import Path

from upshot import jsonl
from upshot.cluster.metrics import Follower, line_of


def test_what_means_the_same_has_our_name_and_the_rest_keeps_its_own() -> None:
    told = {
        "upshot/reward/mean": 0.5,
        "upshot/eval/reward/mean": 1.0,
        "actor/grad_norm": 2.0,
        "perf/mfu/actor": 0.1,
    }
    line = line_of({"step": 3, "data": {**told, "bad": float("nan"), "word": "x"}})
    assert line["phase"] == "rl" and line["step"] == 3
    assert (line["reward/mean"], line["train/grad_norm"], line["eval/reward/mean"]) == (0.5, 2.0, 1.0)
    assert line["verl/perf/mfu/actor"] == 0.1
    assert not {"verl/bad", "verl/word"} & set(line)


def test_lines_are_carried_once_and_only_when_they_are_whole(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "verl.jsonl", tmp_path / "metrics.jsonl"
    follower = Follower(theirs, ours)
    assert follower.follow() == 0
    lines = [json.dumps({"step": step, "data": {"critic/score/mean": 0.1 * step}}) + "\n" for step in (1, 2)]
    theirs.write_text(lines[0] + lines[1][:9])
    assert (follower.follow(), follower.follow()) == (1, 0)
    theirs.write_text("".join(lines))
    assert follower.follow() == 1
    assert [row["step"] for row in jsonl.read(ours)] == [1, 2]
