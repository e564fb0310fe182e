"""Trackers: known, installed, and wandb with a key."""

from __future__ import annotations

import importlib.util
import netrc
import os
from collections.abc import Iterator

from upshot.run.checks.context import CheckContext, Finding
from upshot.run.trackers import check_names, not_installed

WITHOUT_KEY = ("offline", "disabled", "dryrun")


def check(context: CheckContext) -> Iterator[Finding]:
    """Look for what starting the trackers would need."""
    names = context.recipe.trackers
    check_names(names)
    for name in dict.fromkeys(names):
        if importlib.util.find_spec(name) is None:
            yield Finding(not_installed(name))
        elif name == "wandb" and not _has_wandb_key():
            yield Finding("tracker 'wandb' has no key; run `wandb login`, or set WANDB_MODE=offline")


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in WITHOUT_KEY:
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").rpartition("//")[2].partition("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
