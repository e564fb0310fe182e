"""Policy gradient with a value head; see `training/loops/ppo.py`."""

from __future__ import annotations

from upshot.config.method import methods
from upshot.training.methods.rl import RLMethod


@methods.register("ppo")
class PPOMethod(RLMethod):
    """A value head and GAE."""

    credits_tokens = compares = False
    value_head = True
    reads = (
        "group_size", "async_steps", "dynamic_sampling", "loss", "length_norm", "clip", "kl", "entropy", "importance",
        "ppo",
    )  # fmt: skip
    lessons = "upshot.training.loops.ppo"
