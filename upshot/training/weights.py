"""The reference of a run on disk: what the trained weights were when the phase began."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from upshot.core.errors import UserError
from upshot.core.files import fill_folder, place_folder

NAME = "trained.safetensors"


def save_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Weights by name, entirely or not at all."""
    from safetensors.torch import save_file

    partial = folder.with_name(f".partial-{folder.name}")
    fill_folder(partial, lambda to: save_file({name: w.contiguous() for name, w in weights.items()}, to / NAME))
    place_folder(partial, folder)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """What `save_weights` wrote."""
    from safetensors.torch import load_file

    if not (folder / NAME).is_file():
        raise UserError(f"'{folder / NAME}' is gone: the model that the run's reference is cannot be found again")
    return load_file(folder / NAME)
