"""Upshot trains language models on what comes of their words.

As a library: `upshot.reward` scores replies, `upshot.load` and `upshot.train` run a recipe, `upshot.runs` reads what a
run left behind, `upshot.Trainee` is the loop in pieces (sample → score → forward_backward → step). The nouns that your
own code is made of stand beside them. Everything is imported at its first use, so that `import upshot` stays instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upshot import runs as runs
    from upshot.api import reward as reward
    from upshot.api import reward_async as reward_async
    from upshot.chat import Conversation as Conversation
    from upshot.chat import Message as Message
    from upshot.chat import Row as Row
    from upshot.errors import UserError as UserError
    from upshot.models.base import Model as Model
    from upshot.participants.base import Observation as Observation
    from upshot.participants.base import Participant as Participant
    from upshot.participants.base import User as User
    from upshot.recipe import Recipe as Recipe
    from upshot.rewards.credit import Credit as Credit
    from upshot.rewards.credit import Span as Span
    from upshot.rewards.metric import Metric as Metric
    from upshot.rollout.reply import Reply as Reply
    from upshot.score import Reason as Reason
    from upshot.score import Score as Score
    from upshot.tasks.base import Task as Task
    from upshot.trainee import Trainee as Trainee
    from upshot.trainee import talk as talk
    from upshot.training import load as load
    from upshot.training import train as train  # type: ignore[no-redef]
    from upshot.verifiers.base import Verifier as Verifier

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("reward", "reward_async"), "api"),
    **dict.fromkeys(("Conversation", "Message", "Row"), "chat"),
    **dict.fromkeys(("Credit", "Span"), "rewards.credit"),
    **dict.fromkeys(("Observation", "Participant", "User"), "participants.base"),
    **dict.fromkeys(("Reason", "Score"), "score"),
    **dict.fromkeys(("Trainee", "talk"), "trainee"),
    "load": "training",
    "Metric": "rewards.metric",
    "Model": "models.base",
    "Recipe": "recipe",
    "Reply": "rollout.reply",
    "Task": "tasks.base",
    "UserError": "errors",
    "Verifier": "verifiers.base",
}
"""Where each public name lives."""

__all__ = ["Conversation", "Credit", "Message", "Metric", "Model", "Observation", "Participant", "Reason", "Recipe",
           "Reply", "Row", "Score", "Span", "Task", "Trainee", "User", "UserError", "Verifier", "__version__", "load",
           "reward", "reward_async", "runs", "talk", "train"]  # fmt: skip


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use."""
    if name in ("runs", "train"):  # rooms of their own; `upshot.train` can also be called
        return import_module(f"upshot.{name}")
    if name in _HOMES:
        return getattr(import_module(f"upshot.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'upshot' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
