"""Training on a GPU: bfloat16 weights, the engine's kernels, the same loop. Skipped without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from upshot.config.load import load_recipe
from upshot.run.run import train
from upshot.training.learner.batch import sum_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_the_quickstart_trains_and_sampler_and_learner_agree(tmp_path: Path, dtype: str, bound: float) -> None:
    run = tmp_path / dtype
    overrides = [f"model.dtype={dtype}", "model.device=cuda", "warm_start.steps=60", "train.steps=10", f"run_dir={run}"]
    train(load_recipe("quickstart", overrides).recipe)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    warm = [line["loss/nll"] for line in lines if line["phase"] == "warm-start"]
    assert warm[-1] < 0.7 < warm[0]
    assert max(line["policy/kl_to_sampler"] for line in lines if line["phase"] == "rl") < bound


def test_steps_are_played_ahead_on_the_same_gpu(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = ["model.device=cuda", "warm_start.steps=60", "train.steps=10", "train.async_steps=1", f"run_dir={run}"]
    train(load_recipe("quickstart", overrides).recipe)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rl = [line for line in lines if line["phase"] == "rl"]
    assert [line["policy/staleness"] for line in rl] == [0.0] + [1.0] * 9
    assert rl[0]["policy/kl_to_sampler"] < 0.05 and all(
        line["train/skipped"] == 0 for line in rl if "train/skipped" in line
    )
    assert rl[-1]["time/memory_gib"] > 0


def test_sums_of_many_rows_in_few_places_have_the_same_bits_every_time() -> None:
    values = torch.randn(50_000, 3, device="cuda") * 10 ** torch.randn(50_000, 1, device="cuda")
    places = torch.randint(0, 7, (50_000,), device="cuda")
    first = sum_rows(8, places, values)
    assert all(torch.equal(sum_rows(8, places, values), first) for _ in range(20))
    expected = torch.zeros(8, 3, dtype=torch.float64).index_add(0, places.cpu(), values.cpu().double())
    torch.testing.assert_close(first.cpu().double(), expected, rtol=1e-3, atol=1.0)
