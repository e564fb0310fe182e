"""With `model.exact` the learner reproduces the sampler's log-probabilities bit for bit: no divergence on policy."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.training.workshop import metrics
from upshot.config.load import load_recipe
from upshot.run.run import train
from upshot.training.learner.batch import ForwardOutput, TrainBatch
from upshot.training.objectives.objectives import PolicyGradient

SHORT = ["train.steps=2", "train.prompts_per_step=4", "train.group_size=4", "warm_start.steps=3", "warm_start.batch=8"]
SETTINGS = {
    "rl": [],
    "rl-cut-and-scaled": ["episode.temperature=0.8", "episode.top_k=20", "train.token_budget=200"],
    "ppo-checkpointed": ["train.method=ppo", "model.gradient_checkpointing=true"],
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the trained tokens whose log-probability in the learner equals, or does not equal, the sampler's bit for
    bit."""
    counts: Counter[str] = Counter()
    plain = PolicyGradient.loss

    def loss(self: PolicyGradient, batch: TrainBatch, found: ForwardOutput) -> Any:
        same = found.logprobs == batch.columns["old"]
        counts.update(same=int(same.sum()), other=int((~same).sum()))
        return plain(self, batch, found)

    monkeypatch.setattr(PolicyGradient, "loss", loss)
    return counts


def divergence(folder: Path, *settings: str) -> list[float]:
    """The difference between sampler and learner at each step of a short quickstart."""
    train(load_recipe("quickstart", [*SHORT, *settings, f"run_dir={folder}"]).recipe)
    steps = [line for line in metrics(folder) if "policy/kl_to_sampler" in line]
    assert len(steps) == 2 and all(line["train/tokens"] > 0 and line["train/grad_norm"] > 0 for line in steps)
    return [line["policy/kl_to_sampler"] for line in steps]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_learner_reproduces_the_samplers_logprobs_bit_for_bit(
    name: str, tmp_path: Path, compared: Counter[str]
) -> None:
    assert divergence(tmp_path / "run", "model.exact=true", *SETTINGS[name]) == [0.0, 0.0]
    assert compared["other"] == 0 and compared["same"] > 50


def test_without_exact_they_agree_only_approximately(tmp_path: Path, compared: Counter[str]) -> None:
    divergence(tmp_path / "run")
    assert compared["other"] > 0, "else exact mode would not be worth its price"
