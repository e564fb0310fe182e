"""Checks that Ray has the CPUs and GPUs that verl will request: with fewer, verl silently waits for ever.

The numbers are those of verl 0.9.1. A rank is a bundle of one GPU and three CPUs, and all bundles of a node are one
placement group that must fit there as a whole. TransferQueue's controller and each of its storage units hold a CPU; the
units are spread evenly over the nodes. Everything else (agent-loop and reward workers, servers, the runner) needs a CPU
only while it is being placed: one CPU must stay free.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from upshot.run.checks.context import Finding
from upshot.verl.table import POOLS

CPUS_A_RANK = 3
GPUS_A_NODE, STORAGE_UNITS = 8, 8
"""verl's own defaults."""
Read = Callable[[str, Any], Any]
"""Reads a key of verl's config; returns the given default if the key is not set."""


@dataclass(frozen=True)
class Need:
    """What a run requests from Ray."""

    groups: tuple[int, ...]
    """GPUs of every placement group; each must fit on one node."""
    units: int
    """Storage units of TransferQueue."""
    helpers: int = 0
    """GPUs of helper models on each node, in addition to the groups."""

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return sum(group + self.helpers for group in self.groups)

    @property
    def cpus(self) -> int:
        """CPUs in all."""
        return CPUS_A_RANK * sum(self.groups) + self.units + 2

    def describe(self) -> str:
        """The sum as text."""
        ranks = f"{CPUS_A_RANK} for each of {sum(self.groups)} ranks"
        return f"{self.cpus} CPUs ({ranks}, {self.units} storage units, 1 controller, 1 to place the rest)"


@dataclass(frozen=True)
class Node:
    """The free resources of a Ray node."""

    name: str
    cpus: float
    gpus: float


def find_needs(read: Read, helpers: int = 0) -> Need:
    """The resources that a config needs; `helpers`: GPUs of helper models on every node."""
    groups = [int(read("trainer.n_gpus_per_node", GPUS_A_NODE))] * int(read("trainer.nnodes", 1))
    for key, where in POOLS.items():
        if read(key, False):
            groups += [int(read(f"{where}.n_gpus_per_node", 0))] * int(read(f"{where}.nnodes", 0))
    simple = read("transfer_queue.backend.storage_backend", "SimpleStorage") == "SimpleStorage"
    units = int(read("transfer_queue.backend.SimpleStorage.num_data_storage_units", STORAGE_UNITS)) if simple else 0
    return Need(tuple(groups), units, helpers)


def compare_needs(need: Need, nodes: Sequence[Node]) -> Iterator[Finding]:
    """The resources of which there are too few."""
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    if gpus < need.gpus:
        helpers = f" ({need.helpers} a node for helper models)" if need.helpers else ""
        yield Finding(
            f"the run needs {need.gpus} GPUs{helpers} in Ray, which has {gpus:g} free on {len(nodes)} node(s); lower "
            "trainer.n_gpus_per_node or trainer.nnodes, or add nodes"
        )
    elif cpus < need.cpus:
        yield Finding(
            f"the run needs {need.describe()} in Ray, which has {cpus:g} free; verl would wait forever. They are only "
            f"counted: set ray_kwargs.ray_init.num_cpus={need.cpus} (or `ray start --num-cpus`), or fewer "
            "transfer_queue.backend.SimpleStorage.num_data_storage_units"
        )
    else:
        yield from _find_unplaced(need, nodes)


def _find_unplaced(need: Need, nodes: Sequence[Node]) -> Iterator[Finding]:
    """Groups for which no node has room; the largest is placed first, each on a separate node if there are enough."""
    taken = math.ceil(need.units / max(len(nodes), 1))
    left = {place: [node.gpus, node.cpus - taken] for place, node in enumerate(nodes)}  # names may be the same
    for ranks in sorted(need.groups, reverse=True):
        group = ranks + need.helpers
        fits = [place for place, (gpus, cpus) in left.items() if gpus >= group and cpus >= CPUS_A_RANK * ranks]
        if not fits:
            most = max(nodes, key=lambda node: (node.gpus, node.cpus))
            yield Finding(
                f"no node of Ray has {group} GPUs and {CPUS_A_RANK * ranks} CPUs free at once, besides {taken} for "
                f"storage units (the largest, {most.name}, has {most.gpus:g} GPUs and {most.cpus:g} CPUs); verl would "
                "wait forever: lower trainer.n_gpus_per_node, or raise `ray start --num-cpus` there"
            )
            return
        best = min(fits, key=lambda place: left[place])
        left[best] = [left[best][0] - group, left[best][1] - CPUS_A_RANK * ranks]


def before_ray(read: Read, helpers: int = 0) -> Iterator[Finding]:
    """Problems that can be found before Ray runs: only if it is started here, with given counts or our defaults."""
    if is_joined(read):
        return
    need = find_needs(read, helpers)
    if len(need.groups) > 1:
        yield Finding(
            f"trainer.nnodes={len(need.groups)} needs a Ray that spans them: start it (`ray start`), and name it with "
            "+ray_kwargs.ray_init.address=auto or RAY_ADDRESS"
        )
        return
    cpus = read("ray_kwargs.ray_init.num_cpus", None) or os.cpu_count() or 1
    gpus = read("ray_kwargs.ray_init.num_gpus", None)  # without a number, Ray counts them itself
    yield from compare_needs(need, [Node("this machine", float(cpus), need.gpus if gpus is None else float(gpus))])


def ports_of(read: Read) -> list[int]:
    """Ports given for a Ray that will be started here; Ray and verl find all others themselves."""
    port = read("ray_kwargs.ray_init.dashboard_port", None)
    taken = port and read("ray_kwargs.ray_init.include_dashboard", True) and not is_joined(read)
    return [int(port)] if taken else []


def is_joined(read: Read) -> bool:
    """Whether the run joins a Ray that is already running."""
    return (read("ray_kwargs.ray_init.address", None) or os.environ.get("RAY_ADDRESS") or "local") != "local"
