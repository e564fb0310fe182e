"""Upshot trains language models on what comes of their words.

As a library: `upshot.reward` scores replies, `upshot.load` and `upshot.train` run a recipe, `upshot.runs` reads what a
run left behind, `upshot.Trainer` is the loop in pieces (sample → score → forward_backward → step). The nouns that your
own code is made of stand beside them. Everything is imported at its first use, so that `import upshot` stays instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from upshot.core.version import __version__

if TYPE_CHECKING:
    from upshot.api.reward import reward as reward
    from upshot.api.reward import reward_async as reward_async
    from upshot.api.train import load as load
    from upshot.api.train import train as train
    from upshot.config.recipe import Recipe as Recipe
    from upshot.core.conversation import Conversation as Conversation
    from upshot.core.conversation import Message as Message
    from upshot.core.conversation import Row as Row
    from upshot.core.errors import UserError as UserError
    from upshot.core.score import Reason as Reason
    from upshot.core.score import Score as Score
    from upshot.models.base import Model as Model
    from upshot.rewards.credit import Credit as Credit
    from upshot.rewards.credit import Span as Span
    from upshot.rewards.metric import Metric as Metric
    from upshot.rollout.reply import Rollout as Rollout
    from upshot.run import folder as runs
    from upshot.tasks.base import Task as Task
    from upshot.tasks.participants.base import Observation as Observation
    from upshot.tasks.participants.base import Participant as Participant
    from upshot.tasks.participants.base import User as User
    from upshot.tasks.verifiers.base import Verifier as Verifier
    from upshot.training.trainer import Trainer as Trainer
    from upshot.training.trainer import talk as talk

_HOMES = {
    **dict.fromkeys(("reward", "reward_async"), "api.reward"),
    **dict.fromkeys(("Conversation", "Message", "Row"), "core.conversation"),
    **dict.fromkeys(("Credit", "Span"), "rewards.credit"),
    **dict.fromkeys(("Observation", "Participant", "User"), "tasks.participants.base"),
    **dict.fromkeys(("Reason", "Score"), "core.score"),
    **dict.fromkeys(("Trainer", "talk"), "training.trainer"),
    **dict.fromkeys(("load", "train"), "api.train"),
    "Metric": "rewards.metric",
    "Model": "models.base",
    "Recipe": "config.recipe",
    "Rollout": "rollout.reply",
    "Task": "tasks.base",
    "UserError": "core.errors",
    "Verifier": "tasks.verifiers.base",
}
"""Where each public name lives."""

__all__ = ["Conversation", "Credit", "Message", "Metric", "Model", "Observation", "Participant", "Reason", "Recipe",
           "Rollout", "Row", "Score", "Span", "Task", "Trainer", "User", "UserError", "Verifier", "__version__", "load",
           "reward", "reward_async", "runs", "talk", "train"]  # fmt: skip


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use."""
    if name == "runs":
        return import_module("upshot.run.folder")
    if name in _HOMES:
        return getattr(import_module(f"upshot.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'upshot' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
