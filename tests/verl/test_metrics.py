"""verl's metrics under our names."""

from __future__ import annotations

import json
from pathlib import Path

from upshot.verl.metrics import Follower, line_of


def test_what_means_the_same_has_our_name_and_the_rest_keeps_its_own() -> None:
    told = {
        "upshot/reward/mean": 0.5,
        "upshot/eval/reward/mean": 1.0,
        "actor/grad_norm": 2.0,
        "perf/mfu/actor": 0.1,
    }
    line = line_of({"step": 3, "data": {**told, "bad": float("nan"), "word": "x"}})
    assert (line["reward/mean"], line["train/grad_norm"], line["eval/reward/mean"]) == (0.5, 2.0, 1.0)
    assert line["verl/perf/mfu/actor"] == 0.1
    assert not {"verl/bad", "verl/word"} & set(line)


def test_lines_are_read_once_and_only_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "verl.jsonl"
    follower = Follower(path)
    assert follower.new() == []
    lines = [json.dumps({"step": step, "data": {}}) + "\n" for step in (1, 2)]
    path.write_text(lines[0] + lines[1][:9])
    assert [len(follower.new()), len(follower.new())] == [1, 0]
    path.write_text("".join(lines))
    assert [record["step"] for record in follower.new()] == [2]
