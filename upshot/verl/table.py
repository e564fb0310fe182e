"""Maps recipe keys to keys of verl's config (0.9.x), or to none: `table.yaml`, and its conversions.

Every recipe key is in exactly one of three tables: `CARRIED` to verl, `PLAYED` by Upshot itself in verl's workers, or
`LEFT` out with the reason. A test checks this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshot.config.load import read_yaml
from upshot.config.method import method_of

MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
AHEAD = "upshot-ahead"
"""The name of our trainer that plays ahead."""
BACKEND = "upshot"
"""The name of our rollout backend in verl (`adapters/rollout.py`)."""
OPTIM = f"{ACTOR}.optim"
REF, CRITIC = "actor_rollout_ref.ref", "critic"
LIBRARY = "upshot.verl.adapters.register"
SCHEDULES = ("constant", "cosine")


class NoCounterpart(Exception):
    """Why a value has no counterpart in verl."""


@dataclass(frozen=True)
class TableLine:
    """One of verl's keys and the recipe keys that it is made from."""

    theirs: str
    ours: tuple[str, ...]
    make: Callable[..., Any]
    """Computes the value from the values of `ours`; may raise `NoCounterpart`."""
    note: str = ""


@dataclass(frozen=True)
class UnmappedKey:
    """A recipe key without counterpart."""

    reason: str
    blocks: bool = False
    """Whether a run that sets it would be a different run without it, and is refused."""


def words(known: Mapping[Any, Any], what: str) -> Callable[[Any], Any]:
    """A value under verl's name; `NoCounterpart` for values that verl does not have."""

    def make(value: Any) -> Any:
        if value not in known:
            raise NoCounterpart(f"verl has no {what} '{value}'; it has {', '.join(map(str, known))}")
        return known[value]

    return make


def lora(read: Callable[[Any], Any], otherwise: Any) -> Callable[[Any], Any]:
    """A value read from the adapters' settings; `otherwise` if there are no adapters."""

    def make(adapter: Any) -> Any:
        if adapter is None:
            return otherwise
        if adapter.kind != "lora":
            raise NoCounterpart(f"verl has no adapters of kind '{adapter.kind}'")
        return read(adapter)

    return make


def _kl(where: str) -> Callable[[float, str, str], bool]:
    """Whether the divergence is applied there; ppo always subtracts it from the reward."""
    return lambda kl, kl_in, method: bool(kl) and where == ("reward" if method_of(method).value_head else kl_in)


def _schedule(name: str, warmup: int) -> str:
    """verl's name of a schedule. Its constant one starts its warm-up with a step at rate 0; its cosine need not."""
    if name not in SCHEDULES:
        raise NoCounterpart(f"verl has no schedule '{name}'; it has {', '.join(SCHEDULES)}")
    return "cosine" if warmup else name


MAKES: dict[str, Callable[..., Any]] = {
    "same": lambda value: value,
    "either": lambda yes, no: lambda value: yes if value else no,
    "lora_rank": lora(lambda adapter: adapter.r, 0),
    "lora_alpha": lora(lambda adapter: adapter.alpha, 16),
    "lora_targets": lora(lambda adapter: adapter.targets or "all-linear", "all-linear"),
    "dtype": lambda kind: "bfloat16" if kind == "auto" else kind,
    "is_on": lambda how: how != "none",
    "or_none": lambda value: value or -1,
    "share": lambda count, parts: -(-count // parts),
    "warmup_steps": lambda warmup, parts: 0 if warmup < 1 else -(-math.ceil(warmup) // parts),
    "warmup_share": lambda warmup: warmup if warmup < 1 else 0.0,
    "constant": lambda norm, tokens: tokens if norm == "constant" else None,
    "schedule": _schedule,
    "least": lambda least, name: 1.0 if name == "constant" else least,
    "list": list,
    "kl_in_loss": _kl("loss"),
    "kl_in_reward": _kl("reward"),
    "estimator": lambda how: "gae" if method_of(how).value_head else "grpo",
    "two": lambda keep: max(keep, 2),
}


def _line(theirs: str, row: Mapping[str, Any]) -> TableLine:
    make = MAKES[row.get("make", "same")]
    if "words" in row:
        make = words(row["words"], row["what"])
    if "either" in row:
        make = MAKES["either"](*row["either"])
    return TableLine(theirs, tuple(row["ours"].split()), make, row.get("note", ""))


_TABLE = read_yaml(Path(__file__).parent / "table.yaml", "table")
CARRIED = tuple(_line(theirs, row) for theirs, row in _TABLE["carried"].items())
FIXED: dict[str, tuple[Any, str]] = _TABLE["fixed"]
USUAL: dict[str, tuple[Any, str]] = _TABLE["usual"]
OF_FSDP: list[str] = _TABLE["of_fsdp"]
REFUSED: dict[str, str] = _TABLE["refused"]
PLAYED: dict[str, str] = _TABLE["played"]
SPECIAL: list[str] = _TABLE["special"]
AS_POLICY: dict[str, str] = _TABLE["as_policy"]
METRICS: dict[str, str] = _TABLE["metrics"]
PHASES: dict[str, str] = _TABLE["phases"]
POOLS: dict[str, str] = _TABLE["pools"]
WAITS: dict[str, str] = _TABLE["waits"]
LEFT = {key: UnmappedKey(why) for key, why in _TABLE["left"].items()}
LEFT |= {key: UnmappedKey(why, blocks=True) for key, why in _TABLE["left_and_refused"].items()}
