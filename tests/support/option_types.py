"""Options of registered classes, for tests that compare options with documents."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

from upshot.config.registry import BUNDLE, parameters_of


def option_types(thing: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a class and their types, with the fields of grouped options."""
    named, hints, _ = parameters_of(thing)
    bundle = hints.get(BUNDLE) if BUNDLE in named else None
    inner = {} if bundle is None else typing.get_type_hints(bundle, include_extras=True)
    taken = {} if bundle is None else inspect.signature(bundle).parameters
    types = {key: hints.get(key, Any) for key in named if key != BUNDLE}
    return types | {key: inner.get(key, Any) for key in taken}
