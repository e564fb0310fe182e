"""Training on agents of third-party frameworks: every call is recorded by its exact ids. Run by `make test-peers`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.peers.parrot import save_parrot
from tests.rollout.test_agents import check_exact, rows_of, watch
from upshot.config.recipe import AgentConfig
from upshot.config.sampling import Sampling
from upshot.engine.engine import Engine
from upshot.models.engine_model import EngineModel
from upshot.models.local import load_local
from upshot.models.rendering import Renderer
from upshot.rewards.credit import MetricWeight
from upshot.rewards.metric import VerifierMetric
from upshot.rollout.agents.runner import AgentRunner
from upshot.rollout.episode import Policy
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import RolloutContext, play_step
from upshot.rollout.reply import Rollout
from upshot.tasks.slots import SlotsTask

PYTHON = os.environ.get("UPSHOT_PEERS", sys.executable)
"""An environment with the frameworks."""
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    """A policy that calls the tool and repeats its result."""
    folder = tmp_path_factory.mktemp("parrot") / "hermes"
    save_parrot(folder, "hermes")
    module, tokenizer = load_local(str(folder), device="cpu")
    renderer = Renderer(tokenizer)
    model = EngineModel(Engine(module, renderer.end_ids), tokenizer, "policy", renderer)
    yield Policy(model, renderer, Sampling(96, 0.05))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("framework", "paths"), [("agents", 1), ("pydantic_ai", 1), ("litellm", 1), ("smolagents", 2)])
def test_the_calls_of_a_framework_are_recorded_token_by_token(
    framework: str, paths: int, parrot: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subprocess.run([PYTHON, "-c", f"import importlib.util as u; assert u.find_spec('{framework}')"]).returncode:
        pytest.skip(f"{PYTHON} has no {framework}; `make test-peers` has")
    monkeypatch.chdir(ROOT)
    seen: list[tuple[list[int], tuple[int, ...]]] = []
    generate = parrot.model.generate
    watch(parrot, seen)

    async def run() -> list[list[Rollout]]:
        config = AgentConfig(program=f"{PYTHON} -m tests.peers.agents {framework}", seconds=300)
        agent = AgentRunner(config, parrot.model.tokenizer)
        await agent.start()
        futures = Talk({"verifier": VerifierMetric(SlotsTask())}, {"verifier": MetricWeight()})
        try:
            return await play_step(RolloutContext(parrot, futures, agent=agent), rows_of(1), 1, 0)
        finally:
            await agent.aclose()

    try:
        [[reply]] = asyncio.run(run())
    finally:
        parrot.model.generate = generate  # type: ignore[method-assign]
    assert reply.reward.total.value == 1.0, reply.reward.total
    assert len(seen) == 2 and 1 + len(reply.other_paths) == paths
    check_exact(reply, seen)
