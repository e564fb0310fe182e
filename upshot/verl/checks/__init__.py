"""Finds problems before verl starts; without these checks such a run would hang silently.

`find` needs no Ray, and `--dry-run` shows its findings. The driver calls `check_node` and `compare_needs` again inside
Ray, on every node (`adapters/checks.py`). Local mode's own checks are used where they apply here as well.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from upshot.config.layers import COMMAND_LINE
from upshot.config.model_spec import HTTP
from upshot.config.recipe import Recipe
from upshot.models.local import local_path
from upshot.run.checks import data, helpers, learning, output, prompts, run_check
from upshot.run.checks.context import Check, CheckContext, Finding
from upshot.verl.checks import resources
from upshot.verl.checks.node import NodeRequirements, check_node
from upshot.verl.helpers import count_gpus
from upshot.verl.paths import list_paths
from upshot.verl.plan import VerlPlan
from upshot.verl.table import CRITIC, MODEL

SAME: Sequence[Check] = (output.check, data.check, learning.check, prompts.check, helpers.check)
"""Checks of local mode that hold here as well; devices, memory and trackers are verl's."""
EXTERNAL = "VERL_USE_EXTERNAL_MODULES"
VERL = "0.9."
"""Prefix of the versions of verl that have the hooks we use."""


def find(recipe: Recipe, plan: VerlPlan, offline: bool = False, resumed: bool = False) -> list[Finding]:
    """All problems that can be found on this machine; `offline` calls no endpoint."""
    bench = CheckContext(recipe, offline, resumed)
    cluster_checks = (lambda _: resources.before_ray(plan.value, count_gpus(recipe)), lambda _: _here(recipe, plan))
    findings = [finding for check in (*SAME, *cluster_checks) for finding in run_check(check, bench)]
    return list(dict.fromkeys([*findings, *(Finding(note, fatal=False) for note in plan.notes())]))


def requirements_of(recipe: Recipe, read: resources.Read, folder: str) -> NodeRequirements:
    """What every node must have for a recipe and verl's config."""
    return NodeRequirements(
        model=local_path(recipe.model.path) if recipe.model.path else "",
        folder=folder,
        files=tuple(list_paths(recipe)),
        endpoints=tuple(endpoints_of(recipe)),
        keys=tuple(sorted({spec.api_key_env for spec in recipe.needed_models.values() if spec.api_key_env})),
        plugins=tuple(plugins_of(read, os.environ.get(EXTERNAL, ""))),
        environment={"PYTHONPATH": os.pathsep.join([*recipe.code, os.environ.get("PYTHONPATH", "")])},
    )


def endpoints_of(recipe: Recipe) -> list[str]:
    """The addresses that workers call."""
    urls = [spec.url for spec in recipe.models.values() if spec.url]
    all_addresses = [address for url in urls for address in ([url] if isinstance(url, str) else url)]
    addresses = [address for address in all_addresses if address.startswith(HTTP)]
    return list(dict.fromkeys([*addresses, *helpers.list_servers(recipe).values()]))


def plugins_of(read: resources.Read, environment: str) -> list[str]:
    """Plug-in modules from verl's environment variable and config; verl imports them and ignores failures."""
    named = [name for name in environment.split(",") if name.strip()]
    external = read(f"{MODEL}.external_lib", None)
    many = [external] if isinstance(external, str) else list(map(str, external or ()))  # a list, or OmegaConf's
    return [*dict.fromkeys([*map(str.strip, named), *many])]


def _here(recipe: Recipe, plan: VerlPlan) -> Iterator[Finding]:
    """Check this machine; local mode's checks cover the run folder, the endpoints and their keys.

    Our own plug-ins are not imported: the program does so immediately, and reports failures.
    """
    if importlib.util.find_spec("verl") is None:
        yield Finding("--engine verl needs verl: pip install -e '.[verl]'")
        return
    version = next((dist.version for dist in importlib.metadata.distributions(name="verl")), VERL)  # none: a checkout
    if not version.startswith(VERL):
        yield Finding(f"verl {version} is installed; we have run {VERL}x (docs/cluster-nodes.md)", fatal=False)
    from upshot.verl.adapters.composing import find_fault

    if fault := find_fault(plan.overrides()):
        yield Finding(f"verl rejects its config: {fault}")
    yield from _critic(plan)
    wanted = requirements_of(recipe, plan.value, "")
    plugins = tuple(name for name in wanted.plugins if not name.startswith("upshot."))
    ports = tuple(resources.ports_of(plan.value))
    yield from map(Finding, check_node(replace(wanted, endpoints=(), keys=(), plugins=plugins, ports=ports)))


def _critic(plan: VerlPlan) -> Iterator[Finding]:
    """Check for flash attention, without which verl cannot load a value model."""
    attention = plan.value(f"{CRITIC}.model.override_config.attn_implementation")
    chosen = any(s.key.startswith(f"{CRITIC}.model.override") and s.source == COMMAND_LINE for s in plan.settings)
    if plan.value(f"{CRITIC}.enable") and attention == "sdpa" and not chosen:
        yield Finding(
            "train.method=ppo: verl loads its critic only with flash attention, which is not installed here: "
            "pip install flash-attn --no-build-isolation, or set train.method=rl"
        )
