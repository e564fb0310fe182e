"""`train.async_steps` on verl: the next step is played while one is learned, by verl's trainer that pauses servers."""

from __future__ import annotations

import math
from pathlib import Path

from tests.verl.real.verl_run import SMALL, verl_run
from upshot.core.files import read_jsonl
from upshot.tasks.slots import SlotsTask
from upshot.training.loops.phase import pick

STEPS, PROMPTS, REPLIES = 4, 4, 4
AHEAD = ("credit.by=tree", "train.async_steps=1", "train.importance=truncate", f"train.steps={STEPS}", "eval.every=2")


def test_steps_are_played_ahead_and_each_learns_from_its_own_replies(tmp_path: Path) -> None:
    run = verl_run(tmp_path / "run", *SMALL, *AHEAD, ranks=1)
    norms, late = run.series("train/grad_norm"), run.series("policy/staleness")
    assert len(norms) == STEPS and all(math.isfinite(norm) and norm > 0 for norm in norms)
    assert late[0] == 0 and all(0 <= mean <= 1 for mean in late), "at most a step behind"
    assert late[1] > 0, "played while the first step was"
    assert len(run.series("eval/reward/mean")) == 3
    lines = read_jsonl(run.folder / "rollouts.jsonl")
    rows = SlotsTask(rows_per_split=64).rows("train")
    for step in range(1, STEPS + 1):
        own = [line for line in lines if line["step"] == step]
        picked = [rows[place].id for place in pick(len(rows), PROMPTS, step - 1, 0)]
        assert [line["row"] for line in own] == [row for row in picked for _ in range(REPLIES)]
