"""How a model is sampled: plain data that recipes, models and the engine share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Temperature 0 is greedy."""

    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end the completion (not part of its text)."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the completion besides the model's own end-of-turn ids (they stay part of its ids)."""
    seed: int | None = None
    """Seed of this call; sample i of n uses a seed derived from it. None: the backend's own randomness."""
