"""The policy on our engine, as a server of a cluster: ids in, ids and log-probabilities out, with updated weights.

Nothing here imports verl or Ray; `adapters/rollout.py` puts it behind verl's servers. Weights arrive by name, in parts
(`begin_weights`, `load_weights` …, `end_weights`); from the first to the last part, no request is computed.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from upshot.core.errors import UserError
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.sequence import Rules
from upshot.engine.sequence import Sequence as Running

READ = {"logprobs", "top_k", "max_tokens", "stop_token_ids", "seed", "temperature", "top_p", "min_p"}
"""Supported sampling parameters; log-probabilities are always returned."""
NEUTRAL = {"repetition_penalty": 1.0, "ignore_eos": False, "n": 1}
"""Unsupported sampling parameters, with their neutral values."""


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as bytes: Ray shares a numpy array between processes, and numpy has no bfloat16."""

    data: np.ndarray
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> PackedTensor:
        """A tensor's bytes."""
        plain = tensor.detach().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy()
        return cls(data, str(plain.dtype).removeprefix("torch."), tuple(plain.shape))

    def tensor(self) -> torch.Tensor:
        """The tensor, without a copy of the bytes; read-only."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of memory that it may not write
            return torch.from_numpy(self.data).view(getattr(torch, self.dtype)).reshape(self.shape)


async def parts(
    weights: AsyncIterable[tuple[str, torch.Tensor]], dtype: torch.dtype, most: int
) -> AsyncIterator[dict[str, PackedTensor]]:
    """Weights in parts of at most `most` bytes (one tensor may be more), in the sampler's type."""
    part: dict[str, PackedTensor] = {}
    size = 0
    async for name, tensor in weights:
        packed = PackedTensor.of(tensor.detach().to(dtype))
        if part and size + packed.data.nbytes > most:
            yield part
            part, size = {}, 0
        part[name] = packed
        size += packed.data.nbytes
    if part:
        yield part


@dataclass(frozen=True)
class SampledOutput:
    """The answer to one request."""

    ids: list[int]
    logprobs: list[float]
    aborted: bool
    step: int | None
    """The trainer's step whose weights sampled the first id; None before the first sync."""


class Sampler:
    """The engine with its own copy of the model, whose weights are trained elsewhere."""

    def __init__(self, module: Any, end_ids: set[int], seed: int = 0, most_tokens: int = 512) -> None:
        self.module = module
        self.engine = Engine(module, end_ids, EngineSettings(seed=seed))
        self.most_tokens = most_tokens
        """The default number of ids to sample."""
        self._steps: dict[int, int | None] = {self.engine.version: None}
        """The trainer's step of each version of the engine's weights."""
        self._tensors: dict[str, torch.Tensor] = dict(module.state_dict(keep_vars=True))
        """The parameters by name; tied ones under each of their names."""
        self._left: set[int] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._running: set[Running] = set()

    async def sample(self, prompt: Sequence[int], params: Mapping[str, Any]) -> SampledOutput:
        """Continue the ids; waits while weights are being loaded."""
        rules = self._rules(params)
        await self._open.wait()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ended(_: Running) -> None:
            if not done.done():
                done.set_result(None)

        (seq,) = self.engine.submit([int(i) for i in prompt], rules, on_done=ended)
        self._running.add(seq)
        self.engine.wake()
        try:
            await done
        except asyncio.CancelledError:
            self.engine.abort(seq)
            raise
        finally:
            self._running.discard(seq)
        if seq.error is not None:
            raise seq.error
        return SampledOutput(list(seq.sampled), list(seq.logprobs), seq.finish == "abort", self._steps.get(seq.version))

    def _rules(self, params: Mapping[str, Any]) -> Rules:
        for name, value in params.items():
            if name not in READ and value is not None and value != NEUTRAL.get(name):
                known = f"only {name}={NEUTRAL[name]}" if name in NEUTRAL else "no such parameter"
                raise UserError(f"sampling parameter {name}={value!r}: our engine has {known}; set rollout.name=vllm")
        seed = params.get("seed")
        return Rules(
            max_tokens=int(params.get("max_tokens") or self.most_tokens),
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=max(0, int(params.get("top_k") or 0)),  # −1 is 'all' in vLLM's words
            min_p=float(params.get("min_p") or 0.0),
            seed=self.engine.fresh_seed() if seed is None else int(seed),
            stop_ids=frozenset(int(i) for i in params.get("stop_token_ids") or ()),
        )

    # --- weights

    def begin_weights(self) -> None:
        """Prepare for new weights: nothing more is computed with the old ones."""
        self.hold()
        self._left = {tensor.data_ptr() for tensor in self.module.parameters()}

    def load_weights(self, part: Mapping[str, PackedTensor]) -> None:
        """Load a part of the weights."""
        with torch.no_grad():
            for name, packed in part.items():
                target = self._tensors.get(name)
                if target is None or tuple(target.shape) != packed.shape:
                    known = "has none of that name" if target is None else f"has shape {tuple(target.shape)} there"
                    raise UserError(f"the trainer sent the weight '{name}' {packed.shape}; the sampler's model {known}")
                target.copy_(packed.tensor())
                self._left.discard(target.data_ptr())

    def end_weights(self, step: int | None) -> None:
        """All weights have arrived; they are those after the trainer's `step`. `UserError` if some are missing."""
        if self._left:
            lost = [name for name, tensor in self._tensors.items() if tensor.data_ptr() in self._left]
            raise UserError(f"the trainer sent no weights for {', '.join(lost[:3])} ({len(lost)} in all)")
        self._steps[self.engine.weights_changed()] = step
        self.resume_generation()

    # --- pauses

    def hold(self) -> int:
        """Abort requests in progress and let new ones wait; returns the number of aborted ones."""
        self._open.clear()
        running = list(self._running)
        for seq in running:
            self.engine.abort(seq)
        return len(running)

    def resume_generation(self) -> None:
        """Take requests again."""
        self._open.set()
