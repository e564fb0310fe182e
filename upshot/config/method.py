"""What a training method declares of itself: what it learns from, what it needs. One file of `training/methods` each.

A method is a class with `@methods.register("name")`, or `my_pkg.module:MyMethod` in `train.method`. Everybody else asks
`method_of(config)` what it needs, and compares no names.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any

from upshot.config.registry import Registry
from upshot.core.errors import UserError


class TrainingMethod(ABC):
    """A way to learn. `run`, `learner` and `config` are those of `training/`, which this room does not know."""

    samples = False
    """Whether it learns from replies that the policy samples itself."""
    credits_tokens = False
    """Whether parts of a reply, and an episode of several contexts, can each get their own credit."""
    compares = False
    """Whether it learns from how siblings (replies to a prompt, branches of a fork) differ."""
    value_head = False
    """Whether the learner estimates the value of each token."""
    reference = False
    """Whether it always compares the policy with the model that the phase began with."""
    pairs = False
    """Whether an example is a pair of replies, a better and a worse one."""
    imitates = False
    """Whether it learns from dialogues, word by word."""
    dropout = False
    """Whether it learns with dropout: only where log-probabilities are not compared with others."""
    on_ray = False
    """Whether `--engine verl` trains it on Ray; if not, torchrun does."""
    best_metric = "eval/reward/mean"
    """What evaluations are compared by where the recipe names nothing."""
    evaluates: tuple[str, ...] = ()
    """What its evaluations log, by how the names begin; (): what is logged of held-out replies."""
    held_out = ""
    """What an example is called, in the plural, if evaluations read them from `eval.data`; empty: they need no file."""
    reads: tuple[str, ...] = ()
    """Keys of `train` that it reads and some other method does not."""

    loop = ""
    """The module of its loop, imported with PyTorch when it trains."""
    lessons = ""
    """Where it samples: the module that says what a step's replies teach."""

    @property
    def train(self) -> Callable[..., Awaitable[None]]:
        """Its loop: `train(run, config, method)` learns in a run (`LoopRun`), from the run's step to the last one."""
        return importlib.import_module(self.loop).train

    @abstractmethod
    def examples(self, config: Any, task: Any) -> Sequence[Any]:
        """What there is to learn from: rows, dialogues or pairs. A file that is not there is a `UserError`."""

    def held_out_examples(self, recipe: Any, task: Any) -> Sequence[Any] | None:
        """What evaluations measure, `eval.rows` at most; None where they measure replies of the policy."""
        return None

    def describe_data(self, config: Any, task: Any) -> list[str]:
        """What of the examples is left out, or cannot teach much, a sentence each; `UserError` if none can."""
        return []

    def prepare(self, config: Any) -> Callable[..., Any]:
        """Where it samples: the function of `(learner, groups)` that says what a step's replies teach, a `Lesson`. It
        is made once per run, so that names in `config` need not be looked up at every step."""
        return importlib.import_module(self.lessons).prepare

    def needs_reference(self, config: Any) -> bool:
        """Whether it compares the policy with the model that the phase began with."""
        return self.reference

    def check(self, recipe: Any) -> None:
        """Refuse what the method cannot learn with, before any work; it imports no PyTorch."""
        if self.held_out and recipe.eval.every and not recipe.eval.data:
            raise UserError(
                f"eval.every with train.method '{recipe.train.method}' needs held-out {self.held_out}; "
                "set eval.data=FILE, or eval.every=0"
            )

    def check_loss(self, recipe: Any) -> None:
        """Refuse a loss that cannot be had, or options that it does not have."""

    def explain_empty(self, config: Any, task: Any) -> str:
        """What to say when there is nothing to learn from."""
        return f"task '{task.name}' has nothing to train on in its split 'train'; look at the options under `task`"

    def explain_empty_evaluation(self, recipe: Any) -> str:
        """What to say when there is nothing to evaluate."""
        config = recipe.eval
        source = f"eval.data '{config.data}'" if config.data else f"split '{config.split}' of task '{recipe.task.name}'"
        return f"eval.every is {config.every}, but {source} has nothing to evaluate; set eval.data or eval.every=0"


methods: Registry[TrainingMethod] = Registry("training method", "upshot.training.methods")
"""Methods that a recipe can name in `train.method`."""


@lru_cache
def method_of(name: str) -> TrainingMethod:
    """The method of a name or path."""
    return methods.create(name, where="train.method")
