"""`upshot train … --engine verl` without a GPU: `python -m tests.support.verl_cpu RECIPE key=value …`, from a checkout.

The same command with what verl must be told for it before its words, so that yours win. `--join ADDRESS` joins a Ray
that was started under `settings.ENVIRONMENT`, instead of starting one. `reproduce PAPER/TABLE --verl STAGE …` does the
same for the stages of a published table that are named.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.verl_cpu.settings import ENVIRONMENT, list_words
from upshot.cli import main


def run(given: list[str]) -> int:
    """Set the environment, add the settings, and do what `upshot train` does."""
    address = ""
    if "--join" in given:
        at = given.index("--join")
        address, given = given[at + 1], given[:at] + given[at + 2 :]
    ranks = [word.partition("=")[2] for word in given if word.startswith("trainer.n_gpus_per_node=")]
    root = str(Path(__file__).parents[3])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])  # other packages also have a module `tests`
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if given[:1] == ["reproduce"]:
        stages = [given[at + 1] for at, word in enumerate(given) if word == "--verl"]
        return main([*given[:2], *(f"{stage}.{word}" for stage in stages for word in list_words(1)), *given[2:]])
    resumed = "--resume" in given  # the settings are in its folder
    ours = [] if resumed else list_words(int(ranks[-1]) if ranks else 1, address)
    first = [word for word in given[:1] if not resumed]
    return main(["train", *first, *ours, *given[len(first) :], "--engine", "verl"])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
