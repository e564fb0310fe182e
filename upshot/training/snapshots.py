"""Earlier states of the policy: copies of it that speak (classmates, steps played ahead), and their weights on disk.

A copy is the policy as it was when its training began, or as it was every N steps ago. What is not trained is shared
with the policy, so with adapters a copy costs the adapters only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upshot.core.errors import UserError
from upshot.core.files import fill_folder, place_folder
from upshot.engine.engine import Engine
from upshot.models.base import Completion, Model, Request
from upshot.models.engine_model import EngineModel
from upshot.models.rendering import Renderer
from upshot.training.learner.snapshot import on_host

PLAYING: ContextVar[int | None] = ContextVar("playing", default=None)
"""Which of the copies that play steps ahead the policy is, in this step's conversations; None: it is itself."""
WEIGHTS = "trained.safetensors"


class FrozenPolicy(Model):
    """A copy of the policy that is trained no further; `every` 0: never renewed."""

    def __init__(self, sampler: EngineModel, module: Any, every: int, kv_bytes: int = 0) -> None:
        self.name = f"policy@{every or 'start'}"
        self.every = every
        self.policy = module
        shared = {id(p): p for p in module.parameters() if not p.requires_grad}
        shared |= {id(b): b for b in module.buffers()}
        self.module = copy.deepcopy(module, dict(shared)).eval().requires_grad_(False)
        self.sampler = EngineModel(
            Engine(
                self.module, set(sampler.end_ids), replace(sampler.engine.settings, own_stream=True, kv_bytes=kv_bytes)
            ),
            sampler.tokenizer,
            self.name,
            Renderer(sampler.tokenizer),
        )
        self.tokenizer = sampler.tokenizer
        self.abilities = self.sampler.abilities

    async def generate(self, request: Request) -> list[Completion]:
        """What the copy says."""
        return await self.sampler.generate(request)

    async def follow(self, step: int) -> bool:
        """Take over the policy's weights when it is time; whether it was."""
        if not self.every or not step or step % self.every:
            return False
        self.catch_up(step)
        return True

    def catch_up(self, step: int) -> None:
        """Take over the policy's weights, which have taken so many steps."""
        trained = dict(self.policy.named_parameters())
        self._set({name: trained[name].detach() for name in self.own})
        self.version = step

    @property
    def version(self) -> int:
        """How many steps the copy's weights have taken, as its samples say."""
        return self.sampler.engine.version

    @version.setter
    def version(self, step: int) -> None:
        self.sampler.engine.version = step

    @property
    def own(self) -> dict[str, Tensor]:
        """The weights that are not the policy's."""
        shared = {id(p) for p in self.policy.parameters()}
        return {name: p for name, p in self.module.named_parameters() if id(p) not in shared}

    def _set(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, own in self.own.items():
                own.copy_(weights[name])
        self.sampler.engine.weights_changed()

    def snapshot(self) -> dict[str, Tensor]:
        """The copy's own weights in the host's memory, as a checkpoint keeps them."""
        kept: dict[str, Tensor] = on_host(self.own)
        return kept

    def load(self, folder: Path) -> None:
        """The copy that a checkpoint kept."""
        self._set(load_weights(folder))

    async def aclose(self) -> None:
        """Release the copy."""
        await self.sampler.aclose()


class PolicyModel(EngineModel):
    """The model in training, which lends copies of itself."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        name: str,
        renderer: Renderer,
        module: Any,
        kv_of_copies: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(engine, tokenizer, name, renderer)
        self.module = module
        self.kv_of_copies = kv_of_copies or {}
        """Bytes of keys and values of each copy."""
        self.copies: dict[str, FrozenPolicy] = {}
        self.ahead: list[FrozenPolicy] = []
        """Copies that play steps ahead of the learner (rollouts.py)."""

    async def generate(self, request: Request) -> list[Completion]:
        """What the policy says, or the copy that plays this step."""
        playing = PLAYING.get()
        return await (super().generate(request) if playing is None else self.ahead[playing].generate(request))

    def play_ahead(self, steps: int) -> None:
        """Have copies that play so many steps ahead."""
        names = [f"ahead-{number}" for number in range(steps)]
        self.ahead = [self._copy(name, 0) for name in names]
        self.copies |= dict(zip(names, self.ahead, strict=True))

    def copy_at(self, when: str) -> Model:
        """A copy that is trained no further: 'start', or renewed every so many steps."""
        if when not in self.copies:
            if when != "start" and not (when.isdigit() and int(when)):
                raise UserError(f"'policy@{when}' should read 'policy@start' or 'policy@N' with N steps")
            self.copies[when] = self._copy(when, 0 if when == "start" else int(when))
        return self.copies[when]

    def _copy(self, when: str, every: int) -> FrozenPolicy:
        if self.engine.settings.merge == "in place":
            raise UserError(f"the copy 'policy@{when}' reads weights that the engine has merged its adapters into")
        return FrozenPolicy(self, self.module, every, self.kv_of_copies.get(when, 0))

    def snapshot(self) -> Callable[[Path], None]:
        """What writes all copies into a checkpoint, as they are now."""
        kept = {when: twin.snapshot() for when, twin in self.copies.items()}

        def write(folder: Path) -> None:
            for when, weights in kept.items():
                save_weights(folder / f"policy-{when}", weights)

        return write

    def load_copies(self, folder: Path) -> None:
        """The copies that a checkpoint kept."""
        for when, twin in self.copies.items():
            twin.load(folder / f"policy-{when}")


def save_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Weights by name, entirely or not at all: of a copy, or of the reference that a phase began with."""
    from safetensors.torch import save_file

    partial = folder.with_name(f".partial-{folder.name}")
    fill_folder(partial, lambda to: save_file({name: w.contiguous() for name, w in weights.items()}, to / WEIGHTS))
    place_folder(partial, folder)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """What `save_weights` wrote."""
    from safetensors.torch import load_file

    if not (folder / WEIGHTS).is_file():
        raise UserError(f"'{folder / WEIGHTS}' is gone: the model that the run's reference is cannot be found again")
    return load_file(folder / WEIGHTS)
