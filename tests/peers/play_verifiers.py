"""Plays an environment of verifiers with a tiny model, and prints what its episodes are: a JSON list.

Run by a Python that has verifiers, which is lent the rest of ours: ENV TASKSET.
"""

from __future__ import annotations

import asyncio
import json
import sys

from tests.tiny import tiny_policy
from upshot.config.recipe import AgentConfig
from upshot.rewards.credit import MetricWeight
from upshot.rewards.metric import VerifierMetric
from upshot.rollout.agents.runner import AgentRunner
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import RolloutContext, play_step
from upshot.tasks.environments.verifiers import VerifiersTask


async def play(env: str, taskset: dict[str, object]) -> list[dict[str, object]]:
    """Two episodes of every row."""
    task = VerifiersTask(env, taskset, held_out=0)
    policy, _ = tiny_policy()
    futures = Talk({"verifier": VerifierMetric(task)}, {"verifier": MetricWeight()})
    agent = AgentRunner(AgentConfig(program="verifiers"), policy.model.tokenizer, task.agent())
    try:
        groups = await play_step(RolloutContext(policy, futures, agent=agent), task.rows("train"), 2, 0)
    finally:
        await agent.aclose()
    return [
        {
            "worth": reply.reward.total.value,
            "why": reply.reward.total.why,
            "turns": len(list(reply.conversation.samples())),
            "roles": [message.role for message in reply.conversation.messages],
        }
        for group in groups
        for reply in group
    ]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(play(sys.argv[1], json.loads(sys.argv[2])))))
