"""How the engine gets logits out of a transformers model: one forward over packed tokens, with the live parameters.

`ModuleDriver` calls the model itself. `BlockDriver` calls the modules of the block (block.py) one by one, with less
overhead: here by PyTorch's own operations, in fused.py by the GPU's kernels. Projections, embedding and head may have
adapters, which are merged (merged.py) or called as modules. What cannot be driven is refused by name, and the first
forward is compared with the model's own before anything else runs (select.py).
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
from upshot.engine.llama.merged import Merging, Weights
from upshot.engine.llama.shape import Shape, causal_lm, configs_of


class Driver(ABC):
    """One forward over packed tokens, with the live parameters; it keeps no copies of them unless it says so."""

    shape: Shape
    lm: Any
    """The causal LM."""
    rough = False
    """Whether its logits are only near the model's."""
    narrow = False
    """Whether its projections are in 8 bits."""
    has_adapters = False
    """Whether it reads adapters itself, merged or not."""
    by_block = False
    """Whether each of its blocks can be compared with the model's own."""

    @abstractmethod
    def logits(
        self, ids: Tensor, positions: Tensor, step: AttentionStep, last: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Logits of the tokens at the indices `last` (None: all), in `out` if one of their dtype is given."""

    def take(self) -> None:
        """Look up the weights again after `release`."""

    def refresh(self) -> None:
        """The weights changed."""

    def release(self) -> None:
        """Keep nothing but the model itself, until `take`."""

    def pointers(self) -> list[int]:
        """Addresses of weights that are not the model's own; captured steps read from them."""
        return []


def quiet_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules whose training mode changes what they compute or how: dropout and gradient checkpointing."""
    return [
        m
        for m in model.modules()
        if isinstance(m, torch.nn.modules.dropout._DropoutNd) or hasattr(m, "gradient_checkpointing")
    ]


@contextmanager
def out_of_training(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside, none of these modules is in training mode; set one by one, since modes may differ inside a model."""
    loud = [module for module in modules if module.training]
    for module in loud:
        module.training = False
    try:
        yield
    finally:
        for module in loud:
            module.training = True


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
        with attend_by(over_tokens(step.attend), self.configs, sinks=True), out_of_training(self.quiet):
            inputs = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": None}
            done = self.lm(**inputs, use_cache=False, logits_to_keep=0 if last is None else last)
        return write_to(out, done.logits[0])


def rotation_at(core: Any, like: Tensor, positions: Tensor, kind: str = "", half_angles: bool = False) -> Rotation:
    """cos and sin of these positions, [positions, dim / 2], as the model computes them in the dtype of `like`.

    The second half of a head is rotated by the angles of the first, so kernels read each of them once.
    """
    cos, sin = core.rotary_emb(like, positions[None], *([kind] if kind else []))
    half = cos.shape[-1] // (1 if half_angles else 2)
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def no_rotation(rotation: Rotation) -> Rotation:
    """cos and sin by which nothing is rotated: one kernel serves layers that rotate and layers that do not."""
    cos, sin = rotation
    return torch.ones_like(cos), torch.zeros_like(sin)


class BlockDriver(Driver):
    """Calls the model's layers one by one."""

    add_norm = staticmethod(plain.add_norm)
    finish_logits = staticmethod(plain.finish_logits)
    product_back: Callable[..., Tensor] = staticmethod(linear)
    """The product whose result is added to the residual."""

    def __init__(
        self, model: torch.nn.Module, shape: Shape, merge: Merging = "copy", narrow: bool = False, rough: bool = False
    ) -> None:
        self.shape = shape
        # In 8 bits projections are a copy anyway, and the model's own weights stay to be compared with.
        self.model, self.merge, self.narrow = model, "copy" if narrow else merge, narrow
        self.lm, self.quiet = causal_lm(model), quiet_modules(model)
        self.core, self.options = self.lm.model, options_of(self.lm)
        self._originals: dict[int, Tensor] = {}
        self._look_up()
        routed = shape.dtype != torch.float32 and any(layer.experts is not None for layer in self.layers)
        self.rough = narrow or rough or routed
        """Logits are not quite the model's: projections (`narrow`) or keys and values are in 8 bits, or a rounding may
        choose another expert."""

    @property
    def has_adapters(self) -> bool:  # type: ignore[override]
        """Whether there are adapters in the model."""
        return bool(self.weights.layers)

    @property
    def by_block(self) -> bool:  # type: ignore[override]
        """Whether blocks are compared one by one: in 8 bits always, in 16 bits only without adapters."""
        return self.narrow or not self.has_adapters

    def _look_up(self) -> None:
        """Every module's weight, merged as `merge` says."""
        with torch.inference_mode(False), torch.no_grad():  # parameters may become views of what is made here
            self.weights = Weights(self.model, self.shape.dtype, self.merge, self._originals, self.narrow)
            self.embed, self.head = self.weights.alone(self.core.embed_tokens), self.weights.alone(self.lm.lm_head)
            self.layers = [Layer(layer, self.options, self.weights) for layer in self.core.layers]

    def take(self) -> None:
        """Look up every module's weight again, unless they are known."""
        if not self.layers:
            self._look_up()

    def refresh(self) -> None:
        """The weights changed: merge again, and make sure joined tensors are still the parameters' own."""
        if self.weights.layers and self.weights.outdated:
            self._look_up()
            return
        with torch.no_grad():
            for weight in self.weights.held:
                weight.refresh()

    def release(self) -> None:
        """Drop merged weights until `take`; the model is then as if there were no engine."""
        self.layers, self.embed, self.head = [], None, None
        self.weights.release()

    def pointers(self) -> list[int]:
        """Addresses of merged weights."""
        return self.weights.pointers()

    def logits(
        self, ids: Tensor, positions: Tensor, step: AttentionStep, last: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Logits of the tokens at the indices `last` (None: all); see `Driver`.

        A norm begins each half of a block and the residual ends it, so the sum of one half and the norm of the next are
        one operation: `h` is the residual, `x` its norm.
        """
        options = self.options
        with out_of_training(self.quiet):
            h = embed(self.embed, ids)
            if options.embed_factor != 1.0:
                h = h * options.embed_factor
            rotations = self._rotations(h, positions)
            x, h = self._join(h, None, None, self.layers[0].norm1)
            for index, layer in enumerate(self.layers):
                half = self._attend(index, layer, layer.qkv(x), rotations[layer.rotation], step)
                final = index + 1 == len(self.layers)
                if final and last is not None:  # of the other tokens only keys and values are needed
                    half, h = half[last], h[last]
                x, h = self._join(self.product_back(layer.o, half), h, layer.after1, layer.norm2)
                following = self.core.norm if final else self.layers[index + 1].norm1
                half = self._mlp(layer, x) if layer.experts is None else call_experts(layer.experts, x)
                x, h = self._join(half, h, layer.after2, following)
            logits = linear(self.head, x, out)
        if options.logit_divisor == 1.0 and not options.logit_cap:
            return logits
        return self.finish_logits(logits, options.logit_divisor, options.logit_cap)

    def _join(self, x: Tensor, h: Tensor | None, after: Any, before: Any, **how: Any) -> tuple[Any, Tensor]:
        """The residual with a half's result in it (through the norm `after` it), and the norm `before` the next.

        `how`: more options of `add_norm`.
        """
        o = self.options
        factor = 1.0 if h is None else o.factor
        return self.add_norm(x, h, before and before.weight, o.eps, o.form, after and after.weight, factor, **how)

    def _rotations(self, h: Tensor, positions: Tensor) -> dict[str, Any]:
        """cos and sin [tokens, 1, dim], by the kinds of rotation that layers use."""
        rotations: dict[str, Any] = {}
        times = 2 if self.options.half_angles else 1
        for kind in {layer.rotation for layer in self.layers}:
            cos, sin = self.core.rotary_emb(h, positions[None], *([kind] if kind else []))
            rotations[kind] = cos[0][:, None].repeat(1, 1, times), sin[0][:, None].repeat(1, 1, times)
        return rotations

    def _attend(self, index: int, layer: Layer, qkv: Tensor, rotation: Any, step: AttentionStep) -> Any:
        """Attention [tokens, heads × dim] out of the joined product; where it suits a product in 8 bits, too."""
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
        """The second half: up, gated, and down."""
        return self.product_back(layer.down, plain.gate(layer.gate_up(x), self.options.act))


def call_experts(experts: Any, x: Tensor) -> Tensor:
    """The second half where it is a mixture of experts."""
    out = experts(x[None])  # some families also return how they routed
    return (out[0] if isinstance(out, tuple) else out).view(x.shape)  # type: ignore[no-any-return]
