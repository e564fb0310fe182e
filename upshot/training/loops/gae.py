"""Generalised advantage estimation: what a value head's surprises say of each token. A pure function."""

from __future__ import annotations

from collections.abc import Sequence


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float = 1.0, lam: float = 0.95
) -> tuple[list[float], list[float]]:
    """Advantages and value targets over the sampled tokens of one episode."""
    advantages = [0.0] * len(rewards)
    running = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        after = values[t + 1] if t + 1 < len(values) else 0.0
        running = rewards[t] + gamma * after - values[t] + gamma * lam * running
        advantages[t] = running
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]
