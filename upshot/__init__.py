"""Upshot trains language models on what comes of their words."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`upshot.reward` and `upshot.reward_async`, imported at their first use so that `import upshot` stays instant."""
    if name in ("reward", "reward_async"):
        from upshot import api

        return getattr(api, name)
    raise AttributeError(f"module 'upshot' has no attribute '{name}'")
