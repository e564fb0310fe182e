"""Drivers compute logits for the runners: one forward over packed tokens, with the model's live parameters.

`ModuleDriver` calls the model itself. `BlockDriver` calls the modules of its blocks (block.py) one by one, with less
overhead: here with PyTorch's operations, in fused.py with Triton kernels. Projections, embedding and head may have
adapters, which are merged (merged.py) or called as modules. select.py compares a driver with the model before it is
used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from upshot.engine.kernels import plain
from upshot.engine.kernels.plain import Rotation
from upshot.engine.llama.attention import AttentionStep, attend_by, over_tokens
from upshot.engine.llama.block import Layer, options_of
from upshot.engine.llama.linear import embed, linear, write_to
from upshot.engine.llama.merged import Merging, Weights, refresh_all
from upshot.engine.llama.shape import Shape, causal_lm, configs_of


class Driver(ABC):
    """One forward over packed tokens, with the live parameters."""

    shape: Shape
    lm: Any
    """The causal LM."""
    rough = False
    """Whether its logits only approximate the model's, so that checks need a wider limit."""
    narrow = False
    """Whether its projections are in 8 bits."""
    has_adapters = False
    """Whether it handles adapters itself, merged or not."""
    by_block = False
    """Whether each of its blocks can be checked by itself."""

    @abstractmethod
    def logits(
        self, ids: Tensor, positions: Tensor, step: AttentionStep, last: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Logits [len(last), vocab] of the packed tokens `last` (indices; None: all tokens).

        `ids`, `positions`: [tokens]. `out`: a buffer to write them to, if it has their dtype.
        """

    def take(self) -> None:
        """Look up the weights again after `release`."""

    def refresh(self) -> None:
        """The weights changed: update copies of them."""

    def release(self) -> None:
        """Drop all tensors of its own, until `take`."""

    def pointers(self) -> list[int]:
        """Addresses of weights of its own, which CUDA graphs read."""
        return []


def quiet_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules whose training mode changes what they compute or how: those with dropout or gradient checkpointing."""
    return [
        m
        for m in model.modules()
        if isinstance(m, torch.nn.modules.dropout._DropoutNd) or hasattr(m, "gradient_checkpointing")
    ]


@contextmanager
def training_mode(modules: Iterable[torch.nn.Module], on: bool) -> Iterator[None]:
    """Inside, all or none of these modules are in training mode; each gets its own mode back, as modes may differ."""
    others = [module for module in modules if module.training is not on]
    for module in others:
        module.training = on
    try:
        yield
    finally:
        for module in others:
            module.training = not on


class ModuleDriver(Driver):
    """Calls the model itself, with our attention function."""

    def __init__(self, model: torch.nn.Module, shape: Shape) -> None:
        self.shape = shape
        self.lm = causal_lm(model)
        self.configs = configs_of(self.lm)
        self.quiet = quiet_modules(model)

    def logits(
        self, ids: Tensor, positions: Tensor, step: AttentionStep, last: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Logits of the tokens at the indices `last` (None: all); see `Driver`."""
        with attend_by(over_tokens(step.attend), self.configs, sinks=True), training_mode(self.quiet, False):
            inputs = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": None}
            done = self.lm(**inputs, use_cache=False, logits_to_keep=0 if last is None else last)
        return write_to(out, done.logits[0])


def rotation_at(core: Any, like: Tensor, positions: Tensor, kind: str = "", half_angles: bool = False) -> Rotation:
    """cos and sin [positions, dim / 2] as the model computes them, in the dtype of `like`.

    Of half a head only: the second half is rotated by the same angles.
    """
    cos, sin = core.rotary_emb(like, positions[None], *([kind] if kind else []))
    half = cos.shape[-1] // (1 if half_angles else 2)
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def no_rotation(rotation: Rotation) -> Rotation:
    """cos 1 and sin 0 in the same shape, so that one kernel also serves layers without rotation."""
    cos, sin = rotation
    return torch.ones_like(cos), torch.zeros_like(sin)


class BlockDriver(Driver):
    """Calls the model's layers one by one."""

    add_norm = staticmethod(plain.add_norm)
    finish_logits = staticmethod(plain.finish_logits)
    project_out: Callable[..., Tensor] = staticmethod(linear)
    """The output projections of attention and MLP, whose results are added to the residual stream."""

    def __init__(
        self, model: torch.nn.Module, shape: Shape, merge: Merging = "copy", narrow: bool = False, rough: bool = False
    ) -> None:
        self.shape = shape
        # Projections in 8 bits are copies anyway, and the model's own weights are needed for comparison.
        self.model, self.merge, self.narrow = model, "copy" if narrow else merge, narrow
        self.lm, self.quiet = causal_lm(model), quiet_modules(model)
        self.core, self.options = self.lm.model, options_of(self.lm)
        self._originals: dict[int, Tensor] = {}
        self._look_up()
        routed = shape.dtype != torch.float32 and any(layer.experts is not None for layer in self.layers)
        self.rough = narrow or rough or routed
        """Projections (`narrow`) or keys and values are in 8 bits, or different rounding may choose another expert."""

    @property
    def has_adapters(self) -> bool:  # type: ignore[override]
        """Whether the model has adapters."""
        return bool(self.weights.layers)

    @property
    def by_block(self) -> bool:  # type: ignore[override]
        """Whether blocks can be checked one by one: always in 8 bits, in 16 bits only without adapters."""
        return self.narrow or not self.has_adapters

    def _look_up(self) -> None:
        """Look up every module's weight, merged as `merge` says."""
        with torch.inference_mode(False), torch.no_grad():  # parameters may become views of tensors made here
            self.weights = Weights(self.model, self.shape.dtype, self.merge, self._originals, self.narrow)
            self.embed, self.head = self.weights.alone(self.core.embed_tokens), self.weights.alone(self.lm.lm_head)
            self.layers = [Layer(layer, self.options, self.weights) for layer in self.core.layers]

    def take(self) -> None:
        """Look up every module's weight again after `release`."""
        if not self.layers:
            self._look_up()

    def refresh(self) -> None:
        """The weights changed: merge adapters again, and make sure parameters are still views of joined tensors."""
        if self.weights.layers and self.weights.outdated:
            self._look_up()
            return
        with torch.no_grad():
            refresh_all(self.weights.held)

    def release(self) -> None:
        """Drop merged weights until `take`, and restore weights that were merged in place."""
        self.layers, self.embed, self.head = [], None, None
        self.weights.release()

    def pointers(self) -> list[int]:
        """Addresses of merged weights, which CUDA graphs read."""
        return self.weights.pointers()

    def logits(
        self, ids: Tensor, positions: Tensor, step: AttentionStep, last: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Logits of the tokens at the indices `last` (None: all); see `Driver`.

        `h` [tokens, hidden] is the residual stream, `x` its norm. Attention and MLP each begin with a norm and end with
        a residual addition, so `_join` does the addition of one and the norm of the next in one operation.
        """
        options = self.options
        with training_mode(self.quiet, False):
            h = embed(self.embed, ids)
            if options.embed_factor != 1.0:
                h = h * options.embed_factor
            rotations = self._rotations(h, positions)
            x, h = self._join(h, None, None, self.layers[0].norm1)
            for index, layer in enumerate(self.layers):
                update = self._attend(index, layer, layer.qkv(x), rotations[layer.rotation], step)
                final = index + 1 == len(self.layers)
                if final and last is not None:  # the last layer needs only keys and values of the other tokens
                    update, h = update[last], h[last]
                x, h = self._join(self.project_out(layer.o, update), h, layer.after1, layer.norm2)
                following = self.core.norm if final else self.layers[index + 1].norm1
                update = self._mlp(layer, x) if layer.experts is None else call_experts(layer.experts, x)
                x, h = self._join(update, h, layer.after2, following)
            logits = linear(self.head, x, out)
        if options.logit_divisor == 1.0 and not options.logit_cap:
            return logits
        return self.finish_logits(logits, options.logit_divisor, options.logit_cap)

    def _join(self, x: Tensor, h: Tensor | None, after: Any, before: Any, **how: Any) -> tuple[Any, Tensor]:
        """Add an update `x` to the residual stream `h`; returns the result, normed by `before`, and the result itself.

        `after`: a norm of the update. `how`: more options of `add_norm`.
        """
        o = self.options
        factor = 1.0 if h is None else o.factor
        return self.add_norm(x, h, before and before.weight, o.eps, o.form, after and after.weight, factor, **how)

    def _rotations(self, h: Tensor, positions: Tensor) -> dict[str, Any]:
        """cos and sin [tokens, 1, dim] of each kind of rotation that layers use."""
        rotations: dict[str, Any] = {}
        times = 2 if self.options.half_angles else 1
        for kind in {layer.rotation for layer in self.layers}:
            cos, sin = self.core.rotary_emb(h, positions[None], *([kind] if kind else []))
            rotations[kind] = cos[0][:, None].repeat(1, 1, times), sin[0][:, None].repeat(1, 1, times)
        return rotations

    def _attend(self, index: int, layer: Layer, qkv: Tensor, rotation: Any, step: AttentionStep) -> Any:
        """Attention [tokens, heads × dim] from the joined qkv product; a subclass may return it in 8 bits."""
        shape = self.shape
        heads, both = shape.heads, shape.heads + shape.kv_heads
        qkv = qkv.view(len(qkv), both + shape.kv_heads, shape.head_dim)
        qk = qkv[:, :both]
        if layer.head_norms is not None:
            q_weight, k_weight, eps, form = layer.head_norms
            q, k = qk[:, :heads], qk[:, heads:]
            qk = torch.cat([plain.norm_heads(q, q_weight, eps, form), plain.norm_heads(k, k_weight, eps, form)], 1)
        if layer.rotates:
            qk = plain.rotate(qk, *rotation)
        q, k, v = qk[:, :heads], qk[:, heads:], qkv[:, both:]
        return step.attend(index, q, k, v, layer.attention).flatten(1)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        """The MLP: gate and up projections, activation, down projection."""
        return self.project_out(layer.down, plain.gate(layer.gate_up(x), self.options.act))


def call_experts(experts: Any, x: Tensor) -> Tensor:
    """The MLP if it is a mixture of experts."""
    out = experts(x[None])  # some families also return router logits
    return (out[0] if isinstance(out, tuple) else out).view(x.shape)  # type: ignore[no-any-return]
