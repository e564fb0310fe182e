"""The checks that need Ray, before verl starts anything: Ray's resources, and each node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from upshot.config.recipe import Recipe
from upshot.run.checks import refuse
from upshot.run.checks.context import Finding
from upshot.verl.checks import requirements_of
from upshot.verl.checks.node import IMPORT_S, NodeRequirements, check_node, write_mark
from upshot.verl.checks.resources import Node, compare_needs, find_needs
from upshot.verl.helpers import count_gpus

QUEUE = ("TransferQueueController", "transfer_queue")
"""Name and namespace of an actor that verl's runs share: a second run on the same Ray would mix its rows with ours."""


def check_cluster(recipe: Recipe, config: Any, folder: Path) -> None:
    """Refuse what would hang or fail later: `UserError` with everything that is wrong."""

    def read(key: str, otherwise: Any) -> Any:
        value = OmegaConf.select(config, key)
        return otherwise if value is None else value

    mark = write_mark(folder)
    try:
        wanted = replace(requirements_of(recipe, read, str(folder)), mark=mark)
        refuse([*compare_needs(find_needs(read, count_gpus(recipe)), nodes_of()), *_other_run(), *_everywhere(wanted)])
    finally:
        (folder / mark).unlink(missing_ok=True)


def nodes_of() -> list[Node]:
    """The nodes of this Ray, with their free resources."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        Node(node["NodeManagerHostname"], resources.get("CPU", 0.0), resources.get("GPU", resources.get("NPU", 0.0)))
        for node in ray.nodes()
        if node["Alive"] and (resources := free.get(node["NodeID"], {}))
    ]


def _other_run() -> Iterator[Finding]:
    name, namespace = QUEUE
    try:
        ray.get_actor(name, namespace)
    except ValueError:
        return
    yield Finding(
        "another run of verl uses this Ray (its TransferQueue is there), and the two would mix their rows; wait for "
        "its end, or start a separate Ray for this one"
    )


def _everywhere(wanted: NodeRequirements) -> Iterator[Finding]:
    """Check all nodes at the same time; on this node the plug-ins were imported before Ray was started."""
    here = ray.get_runtime_context().get_node_id()
    names = {}
    for node in ray.nodes():
        if node["Alive"]:
            wants = replace(wanted, plugins=()) if node["NodeID"] == here else wanted
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            probe = ray.remote(num_cpus=0, max_retries=0)(check_node).options(scheduling_strategy=where).remote(wants)
            names[probe] = node["NodeManagerHostname"]
    done, late = ray.wait(list(names), num_returns=len(names), timeout=2 * IMPORT_S)
    yield from (Finding(f"node {names[probe]}: no answer within {2 * IMPORT_S:.0f} s") for probe in late)
    for probe in done:
        try:
            yield from (Finding(f"node {names[probe]}: {problem}") for problem in ray.get(probe))
        except RayError as error:
            yield Finding(f"node {names[probe]}: {str(error).strip().splitlines()[-1]}; is upshot installed there?")
