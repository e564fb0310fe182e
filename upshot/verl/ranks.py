"""Methods that need no Ray (sft, dpo, online-dpo): `--engine verl` runs them in local mode on as many ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from upshot.core.errors import UserError
from upshot.verl.plan import parse_override

RANKS = ("trainer.n_gpus_per_node", "trainer.nnodes")


def torchrun_command(words: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """The command that trains; `words` are arguments of `upshot train`, `theirs` verl's keys: only ranks are used."""
    settings = {setting.key: setting.value for setting in map(parse_override, theirs)}
    if other := [key for key in settings if key not in RANKS]:
        raise UserError(f"{other[0]} belongs to verl, but this method trains with torchrun alone; leave it out")
    if settings.get("trainer.nnodes", 1) != 1:
        raise UserError("several nodes without Ray: start torchrun on each with -m upshot train and the same arguments")
    ranks = int(settings.get("trainer.n_gpus_per_node", 1))
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*program, "-m", "upshot.cli", "train", *words]
