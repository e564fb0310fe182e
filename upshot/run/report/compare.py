"""Runs beside each other: the keys in which their recipes differ, which are one experiment, what each came to.

Used by the page and by `upshot runs`. It reads recipes as they were written, those of other versions too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from upshot.config.layers import flatten
from upshot.config.yaml_text import parse_yaml
from upshot.run.report.curves import Curves

NOT_SETTINGS = {"name", "run_dir"}
"""What every run has of its own, whatever it does."""
SEED = "seed"
RESULTS = ("eval/reward/mean", "eval/loss/nll", "eval/loss/dpo", "reward/mean", "loss/nll", "loss/dpo")
"""A run's result is the first of these that it logged."""
UNSET = "–"


def settings_of(recipe: str | None) -> dict[str, str]:
    """A recipe's keys with dots and their values as text; none where it cannot be read."""
    try:
        loaded = parse_yaml(recipe or "")
    except yaml.YAMLError:
        return {}
    leaves = flatten(loaded) if isinstance(loaded, dict) else ()
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for key, value in leaves
    }


def differences(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """The keys in which recipes differ, with the value of each."""
    readable = [recipe for recipe in settings if recipe]
    keys = dict.fromkeys(key for recipe in readable for key in recipe)
    return {
        key: [recipe.get(key, UNSET) for recipe in settings]
        for key in keys
        if key not in NOT_SETTINGS and len({recipe.get(key, UNSET) for recipe in readable}) > 1
    }


def experiments(settings: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[str]:
    """The experiment of each run: the first run's name for all that differ from it in their seed alone."""
    first: dict[str, str] = {}
    seeds: set[tuple[str, str]] = set()
    out = []
    for recipe, name in zip(settings, names, strict=True):
        rest = json.dumps({key: recipe[key] for key in sorted(recipe) if key not in NOT_SETTINGS and key != SEED})
        again = (rest, recipe.get(SEED, UNSET)) in seeds  # the same settings again are not another seed
        seeds.add((rest, recipe.get(SEED, UNSET)))
        out.append(name if again or SEED not in recipe else first.setdefault(rest, name))
    return out


def result_of(curves: Curves) -> dict[str, Any] | None:
    """What a run came to: by which metric, its last value and its best; None where it logged none of them."""
    key = next((key for key in RESULTS if curves.last(key) is not None), None)
    return None if key is None else {"key": key, "last": curves.last(key), "best": curves.best(key)}
