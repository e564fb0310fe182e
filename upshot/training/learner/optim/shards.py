"""The state of `MasterAdamW` in parts and whole: what one rank keeps of it, and what a checkpoint holds.

A state names parameters by their place in a list. Its Adam numbers them anew, those that decay (matrices) first; so a
part's numbers are others than the whole's. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

State = Mapping[str, Any]


def numbered(places: Sequence[int], matrices: Sequence[bool]) -> list[int]:
    """Places in the order of Adam's numbers."""
    return [i for i in places if matrices[i]] + [i for i in places if not matrices[i]]


def part(state: State, places: Sequence[int], matrices: Sequence[bool]) -> dict[str, Any]:
    """What of a whole state belongs to the parameters at these places."""
    numbers = {place: n for n, place in enumerate(numbered(range(len(matrices)), matrices))}
    own = [numbers[place] for place in numbered(places, matrices)]
    adam = dict(state["adam"])
    if "moments" in adam:
        adam["moments"] = [adam["moments"][n] for n in own]
    else:
        adam["state"] = {new: adam["state"][n] for new, n in enumerate(own) if n in adam["state"]}
        groups = [{**g, "params": [own.index(n) for n in g["params"] if n in own]} for g in adam["param_groups"]]
        adam["param_groups"] = [group for group in groups if group["params"]]
    masters = state["masters"]
    return {"adam": adam, "masters": {i: masters[p] for i, p in enumerate(places) if p in masters}}


def whole(parts: Sequence[State], owners: Sequence[int], matrices: Sequence[bool]) -> dict[str, Any]:
    """The state of all parameters, from that of each rank; one without parameters has an empty one."""
    numbers = {place: n for n, place in enumerate(numbered(range(len(matrices)), matrices))}
    turn_snapshots: dict[int, Any] = {}
    masters: dict[int, Tensor] = {}
    groups: dict[bool, dict[str, Any]] = {}
    for rank, state in enumerate(parts):
        places = [i for i, owner in enumerate(owners) if owner == rank]
        own = numbered(places, matrices)
        if not own:
            continue
        adam = state["adam"]
        found = dict(enumerate(adam["moments"])) if "moments" in adam else adam["state"]
        turn_snapshots |= {numbers[own[n]]: value for n, value in found.items()}
        masters |= {places[i]: value for i, value in state["masters"].items()}
        for group in adam.get("param_groups", ()):
            groups.setdefault(matrices[own[group["params"][0]]], group)
    ordered = {n: turn_snapshots[n] for n in sorted(turn_snapshots)}
    if not groups:
        adam = next(state["adam"] for state in parts if state)
        return {"adam": {**adam, "moments": [*ordered.values()]}, "masters": dict(sorted(masters.items()))}
    members = {kind: [n for place, n in numbers.items() if matrices[place] == kind] for kind in groups}
    told = [{**groups[kind], "params": sorted(members[kind])} for kind in sorted(groups, reverse=True)]
    return {"adam": {"state": ordered, "param_groups": told}, "masters": dict(sorted(masters.items()))}


@dataclass(frozen=True)
class Leaf:
    """Where a tensor stands."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def outline(state: Any) -> Any:
    """A state with a `Leaf` in the place of each tensor."""
    return _mapped(state, lambda x: Leaf(tuple(x.shape), x.dtype, x.device.type) if isinstance(x, Tensor) else x)


def filled(lines: Any, find: Callable[[Leaf], Tensor]) -> Any:
    """An outline with tensors for its leaves, found in the order of `leaves`."""
    return _mapped(lines, lambda x: find(x) if isinstance(x, Leaf) else x)


def leaves(state: Any) -> Iterator[Tensor]:
    """The tensors of a state, in order."""
    found: list[Tensor] = []
    _mapped(state, lambda x: found.append(x) if isinstance(x, Tensor) else None)
    return iter(found)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)
