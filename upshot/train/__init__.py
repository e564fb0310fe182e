"""The learner and the loops. As a function, `upshot.train(recipe)` runs a recipe (`upshot/training.py`)."""

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """A room of the house that can also be called: `upshot.train` is its name and the library's verb at once."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a recipe."""
        from upshot.training import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
