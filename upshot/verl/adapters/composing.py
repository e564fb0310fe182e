"""Lets verl check its config: hydra composes it as the program will, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

CONFIG = ("verl.trainer.config", "ppo_trainer")


def find_fault(overrides: Sequence[str]) -> str | None:
    """Hydra's objection to the arguments of a command line; None if it accepts them."""
    module, name = CONFIG
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(module, version_base=None):
            compose(name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        causes = [str(each).strip() for each in (error, error.__cause__) if each is not None]
        return " ".join(" ".join(dict.fromkeys(causes)).split())
    return None
