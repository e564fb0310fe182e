"""Where the helper models of a recipe run on a cluster: behind a URL or, if given as folders, in a process per node.

The processes are Ray actors (`adapters/helpers.py`); nothing here imports Ray.
"""

from __future__ import annotations

from collections.abc import Iterator

from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import Recipe
from upshot.verl.plan import MissingKey

CUDA = "cuda"


def gpus_of(spec: ModelSpec) -> int:
    """GPUs that a helper model takes on every node with its process; none unless its spec says so."""
    return int(spec.device.startswith(CUDA))


def list_loaded(recipe: Recipe) -> dict[str, ModelSpec]:
    """Helper models that are loaded on the nodes, by role; roles with the same spec share one process."""
    return {role: spec for role, spec in recipe.needed_models.items() if spec.kind == "local"}


def count_gpus(recipe: Recipe) -> int:
    """GPUs that the helper models take on every node, in addition to those of the ranks."""
    specs = {spec.model_dump_json(): spec for spec in list_loaded(recipe).values()}
    return sum(map(gpus_of, specs.values()))


def describe_helpers(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Recipe keys of the helper models, and where each model runs."""
    for role, spec in list_loaded(recipe).items():
        where = "on an additional GPU of it" if gpus_of(spec) else "on its CPUs (device: cuda asks Ray for a GPU)"
        yield f"models.{role}={spec.model}", f"loaded once per node, {where}"


def find_unplaceable(recipe: Recipe) -> Iterator[MissingKey]:
    """Devices that Ray cannot assign."""
    for role, spec in list_loaded(recipe).items():
        if spec.device not in ("auto", "cpu", CUDA):
            why = f"Ray assigns the GPUs; set models.{role}.device={CUDA}, or cpu"
            yield MissingKey(f"models.{role}.device", spec.device, why, True)
