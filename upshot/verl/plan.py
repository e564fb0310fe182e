"""verl's config as data: its settings with their sources, recipe keys without a counterpart, and hydra's syntax.

`config.py` makes one from a recipe. Neither torch nor verl is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pydantic import BaseModel

from upshot.config.layers import COMMAND_LINE, differences, flatten
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.verl.table import CARRIED, LEFT, SPECIAL, NoCounterpart, TableLine

VERLS = ("trainer", "actor_rollout_ref", "algorithm", "data", "critic", "ray_kwargs", "transfer_queue", "model_engine")
THEIRS = (*VERLS, "verl", "upshot")
"""Sections of verl's config that the command line may set. `verl.` marks verl's key if both have it. Our own settings
that apply only to a cluster (`upshot.watch`) have a separate section."""
RECIPE = "UPSHOT_CLUSTER_RECIPE"
"""The environment variable with the recipe's path, for verl's processes."""
WORKERS = "workers.yaml"
"""The file of that recipe in the run folder: the run's recipe, with the addresses of its running servers."""
NOTED = ("model.lora.dropout", "eval.monitor", "model_engine", "train.async_steps")
"""Recipe keys that are left out, or mean something else, with a short reason."""
UNKNOWN, UNMADE = "(measured at the start)", "(made at the start)"
MAIN = "upshot.verl.adapters.main"
TOKENS = 16384
"""verl's own token budget of a micro-batch."""


@dataclass(frozen=True)
class VerlSetting:
    """One value of verl's config, and its origin: recipe keys, a measurement, or a reason."""

    key: str
    value: Any
    source: str
    mark: str = ""
    """hydra's own mark before the key: '+' adds one that verl's config does not have, '++' whether or not."""


@dataclass(frozen=True)
class MissingKey:
    """A key of the recipe that has no counterpart in verl."""

    key: str
    value: Any
    reason: str
    blocks: bool
    """Whether the recipe sets it, and would be a different recipe without it."""


@dataclass(frozen=True)
class ClusterPlace:
    """Where a run takes place, and what was measured there; None: not known yet."""

    folder: str = "RUN"
    rows: int | None = None
    prompt_tokens: int | None = None
    """Length of the longest prompt, in ids."""
    context: int | None = None
    """Maximum number of ids of prompt and reply together."""


@dataclass(frozen=True)
class VerlPlan:
    """verl's config for a recipe."""

    settings: tuple[VerlSetting, ...]
    played: tuple[tuple[str, str], ...]
    """Recipe keys that Upshot itself uses in verl's workers, and for what."""
    missing: tuple[MissingKey, ...]

    def check(self) -> None:
        """Refuse a recipe that would be a different one on verl."""
        first = {m.reason: m for m in reversed(self.missing) if m.blocks}
        problems = [f"{m.key}={_short(m.value)}: {m.reason}" for m in reversed(first.values())]
        if problems:
            raise UserError(f"verl cannot run this recipe as it stands: {'; '.join(problems)}")

    def notes(self) -> list[str]:
        """Differences on verl for which the run is not refused; they are printed before it starts."""
        noted = [m for m in self.missing if not m.blocks and m.key in NOTED and m.value]
        return [f"{m.key}={_short(m.value)}: {m.reason}" for m in noted]

    def value(self, key: str, otherwise: Any = None) -> Any:
        """The value of one of verl's keys; `otherwise` if nothing sets it here."""
        return next((setting.value for setting in self.settings if setting.key == key), otherwise)

    @property
    def ranks(self) -> int:
        """The number of training processes; verl's own default is 8 on one node."""
        return int(self.value("trainer.n_gpus_per_node", 8)) * int(self.value("trainer.nnodes", 1))

    def overrides(self) -> list[str]:
        """The settings as hydra reads them on a command line."""
        return [f"{s.mark}{s.key}={_hydra(s.value)}" for s in self.settings]

    def page(self) -> str:
        """Both sides, for `--dry-run`."""
        lines = ["verl's config", *(f"  {s.key}={_short(s.value)}    ← {s.source}" for s in self.settings)]
        lines += ["", "by Upshot, in verl's workers", *(f"  {key}    {why}" for key, why in self.played)]
        lines += ["", "without a counterpart in verl"]
        missing = sorted(self.missing, key=lambda m: not m.blocks)
        lines += [f"  {'! ' if m.blocks else ''}{m.key}={_short(m.value)}    {m.reason}" for m in missing]
        return "\n".join(lines)


def is_theirs(word: str) -> bool:
    """Whether a `key=value` of the command line is for verl and not for the recipe."""
    return word.lstrip("+").split("=")[0].split(".")[0] in THEIRS


def carry_over(recipe: Recipe, lines: Sequence[TableLine]) -> tuple[list[VerlSetting], list[MissingKey]]:
    """The settings that a table carries over from a recipe, and the keys without a counterpart."""
    settings, missing = [], []
    for line in lines:
        source = ", ".join(line.ours) + (f" ({line.note})" if line.note else "")
        try:
            value = line.make(*(attrgetter(key)(recipe) for key in line.ours))
            settings.append(VerlSetting(line.theirs, value, source))
        except NoCounterpart as why:
            value = attrgetter(line.ours[0])(recipe)
            plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
            missing.append(MissingKey(line.ours[0], plain, str(why), True))
    return settings, list({m.reason: m for m in missing}.values())


def find_uncarried(recipe: Recipe) -> list[MissingKey]:
    """The keys without a counterpart; one that blocks does so only if its value is not the default."""
    changed = differences(Recipe(task=recipe.task), recipe)
    return [
        MissingKey(key, value, LEFT[entry].reason, LEFT[entry].blocks and key in changed)
        for key, value in flatten(recipe.model_dump(mode="json"))
        if (entry := uncarried_entry(key)) is not None
    ]


def uncarried_entry(key: str) -> str | None:
    """The entry of `LEFT` for a recipe key; None if the key is carried or played."""
    carried = {name for line in CARRIED for name in line.ours}.union(SPECIAL)
    fits = [name for name in LEFT if is_under(key, name)]
    return None if any(is_under(key, name) for name in carried) or not fits else max(fits, key=len)


def is_under(key: str, prefix: str) -> bool:
    """Whether a dotted key equals another one or lies below it."""
    return key == prefix or key.startswith(prefix + ".")


def parse_override(word: str) -> VerlSetting:
    """A `key=value` of the command line."""
    import yaml

    key, equals, text = word.lstrip("+").partition("=")
    if not equals:
        raise UserError(f"'{word}' is not a key=value of verl's config")
    mark = "++" if key.startswith("upshot.") else word[: len(word) - len(word.lstrip("+"))]
    return VerlSetting(key.removeprefix("verl."), yaml.safe_load(text), COMMAND_LINE, mark)


def _hydra(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_hydra, value)) + "]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./-]+", value) else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


def _short(value: Any) -> str:
    return _hydra(value) if not isinstance(value, str) else value
