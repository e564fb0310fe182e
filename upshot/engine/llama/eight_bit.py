"""Projections in 8 bits (E4M3, kernels/fp8.py): a copy of trained weights, or the only weights of a frozen model.

For a trained model, `merged.MergedWeight` is the engine's copy with adapters merged; it is quantized again in place
after every change, since CUDA graphs read its address. In a frozen model, `Linear8` replaces each projection
(`narrow_projections`, called when models/local.py loads it), which halves the memory of its weights. Drivers read both
through `Projections8`. Embedding, head and norms keep their dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from upshot.core.errors import UserError
from upshot.engine.llama.linear import TOGETHER, Projections, join_rows
from upshot.engine.llama.lora import adapters_of, base_module, base_weight, can_merge, is_plain, merge_chunks

PROJECTIONS = (*(name for names in TOGETHER for name in names), "o_proj", "down_proj")
FAMILIES8 = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")
"""Families whose block was tested in 8 bits; what others add (experts, norms after projections) was not."""
WAY_OUT = "leave it out to sample with the weights as they are"
LARGEST, LEAST = 448.0, 1e-12
"""The largest number of E4M3, and the smallest scale, so that zeros do not divide by zero."""
MOST_KEY_BIAS = 10.0
"""The largest bias of keys that may be kept in 8 bits. Rounding to 8 bits changes a number by up to a sixteenth. With a
large bias (Qwen2.5 has such) that is more than the differences between keys: at a bias of 60 log-probabilities were off
by 0.55 on average instead of 0.08 (benchmarks/key_biases.py)."""


class Linear8(torch.nn.Module):
    """A projection in 8 bits with one scale, in a frozen model."""

    def __init__(self, linear: torch.nn.Linear, scale: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        with torch.no_grad():
            values = linear.weight.detach().float().div_(scale).to(torch.float8_e4m3fn)
        self.weight = torch.nn.Parameter(values, requires_grad=False)
        self.scale = torch.nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """The product in the dtype of x; the reference for the engine's own product in 8 bits."""
        return F.linear(x, (self.weight.float() * self.scale).to(x.dtype), self.bias)


def narrow_projections(model: torch.nn.Module) -> None:
    """Replace every projection of the model's blocks by a `Linear8`; projections of one input share a scale."""
    for parent in list(model.modules()):
        for names in (*TOGETHER, ("o_proj",), ("down_proj",)):
            plain = {n: m for n, m in parent.named_children() if n in names and type(m) is torch.nn.Linear}
            if plain:
                largest = torch.stack([m.weight.detach().abs().amax() for m in plain.values()]).amax().float()
                scale = largest.clamp_min_(LEAST).div_(LARGEST).view(1)
                for name, module in plain.items():
                    setattr(parent, name, Linear8(module, scale.clone()))


class Projections8(Projections):
    """Several projections of one input as one product in 8 bits; the input may be quantized already (`ScaledRows`)."""

    joined: Any
    """`merged.MergedWeight` or `Joined8`."""

    def __init__(self, modules: Sequence[Any], joined: Any) -> None:
        self.modules, self.joined = list(modules), joined

    def __call__(self, x: Any) -> Any:
        """Results [rows, n] side by side; as `ScaledRows` if the reader still has to scale the rows."""
        return self._product(x, False)

    def in_parts(self, x: Any) -> Any:
        """The same; if split-K is faster, as float32 partial sums [parts, rows, n], which `add_norm` adds up."""
        return self._product(x, self.joined.bias is None)

    def _product(self, x: Any, parts: bool) -> Any:
        from upshot.engine.kernels.fp8 import ScaledRows, product, quantize

        narrow = x if isinstance(x, ScaledRows) else quantize(x)
        out = product(narrow, ScaledRows(self.joined.weight, self.joined.scale), self.joined.dtype, parts)
        if self.joined.bias is None:
            return out
        out = out.values.mul_(out.scale[:, None]) if isinstance(out, ScaledRows) else out
        return out.add_(self.joined.bias)


class Joined8:
    """Frozen projections of one input, made views of one tensor."""

    def __init__(self, modules: Sequence[Linear8], dtype: torch.dtype) -> None:
        self.modules, self.dtype = modules, dtype
        self.bias: Tensor | None = None
        for module in modules:
            _check_sizes(module)
        self.refresh()

    def refresh(self) -> None:
        """Look up their addresses again; their values never change."""
        self.weight, self.scale = join_rows([module.weight for module in self.modules]), self.modules[0].scale
        biases = [module.bias.detach() for module in self.modules if module.bias is not None]
        if biases:  # in place, because CUDA graphs read this address
            self.bias = torch.cat(biases, out=self.bias)


def quantize_together(groups: Iterable[tuple[Sequence[Any], Sequence[Tensor], Tensor]]) -> None:
    """Quantize the weights of projections, adapters merged: of each group (modules, values, scale) into `values` with a
    common `scale`."""
    from upshot.engine.kernels.fp8 import MOST_RANK, ScaledRows, WideWeight, weight_quantizer

    whole, chunked = [], []
    for modules, values, scale in groups:
        scale.fill_(LEAST)
        for module, out in zip(modules, values, strict=True):
            parts = adapters_of(module)
            simple = not parts or (len(parts) == 1 and parts[0].magnitude is None and parts[0].up.shape[1] <= MOST_RANK)
            if simple and is_plain(base_module(module)):
                whole.append(WideWeight(base_weight(module), parts[0][:3] if parts else None, ScaledRows(out, scale)))
            else:
                chunked.append((module, parts, out, scale))
    quantize = weight_quantizer(whole)
    for write in (False, True):  # the first pass raises the scales to the largest ones needed
        quantize(write)
        for module, parts, out, scale in chunked:
            whole_base = base_weight(module)
            for rows, merged in merge_chunks(whole_base, parts) if parts else [(slice(None), whole_base)]:
                weight_quantizer([WideWeight(merged, None, ScaledRows(out[rows], scale))])(write)


def check_eight_bits(family: str, shape: Any, settings: Any, fused: bool) -> None:
    """`UserError` if the engine cannot use weights in 8 bits; `fused`: whether the fused driver can be used."""
    asked = "weights: fp8 (model.engine.weights, models.NAME.weights)"
    if settings.exact:
        raise UserError(f"{asked} and exact log-probabilities cannot be combined; leave one of them out")
    if shape.device.type != "cuda" and not settings.kernels:
        raise UserError(f"{asked} needs a GPU with 8-bit products (Hopper or later), not {shape.device}; {WAY_OUT}")
    if shape.device.type == "cuda":
        capability = torch.cuda.get_device_capability(shape.device)
        if capability < (9, 0):
            name, number = torch.cuda.get_device_name(shape.device), ".".join(map(str, capability))
            raise UserError(f"{asked} needs Hopper or later (compute capability 9.0), {name} has {number}; {WAY_OUT}")
        if shape.dtype != torch.bfloat16:
            raise UserError(f"{asked} needs a model in bfloat16, this one is in {shape.dtype}; set its dtype")
    if not fused or family not in FAMILIES8:
        raise UserError(f"{asked} was tested with {', '.join(FAMILIES8)} and the fused block, not {family}; {WAY_OUT}")


def check_eight_bit_cache(model: torch.nn.Module, shape: Any, settings: Any, fused: bool) -> None:
    """`UserError` if keys and values cannot be kept in 8 bits; `fused`: whether the fused driver can be used."""
    asked = "kv: fp8 (model.engine.kv, models.NAME.kv)"
    if settings.exact:
        raise UserError(f"{asked} and exact log-probabilities cannot be combined; leave one of them out")
    if shape.device.type == "cuda" and torch.cuda.get_device_capability(shape.device) < (8, 9):
        raise UserError(f"{asked} needs a GPU with 8-bit numbers (compute capability 8.9 or later); set kv: model")
    if not fused:
        raise UserError(f"{asked} needs a GPU and a family that the fused block serves (docs/engine.md); set kv: model")
    names = ("k_proj.bias", "k_proj.base_layer.bias")
    biases = [float(bias.detach().abs().max()) for name, bias in model.named_parameters() if name.endswith(names)]
    if max(biases, default=0.0) > MOST_KEY_BIAS:
        raise UserError(
            f"{asked} would round away the differences between this model's keys, which have biases of up to "
            f"{max(biases):.0f} (at most {MOST_KEY_BIAS:.0f}); set kv: model"
        )


def check_projections(modules: Sequence[Any]) -> None:
    """`UserError` if a projection cannot be quantized."""
    for module in modules:
        if not can_merge(module):
            raise UserError(f"weights: fp8 needs adapters that can be merged, not {type(module).__name__}; {WAY_OUT}")
        _check_sizes(module)


def _check_sizes(module: Any) -> None:
    inner, outer = module.in_features, module.out_features
    if inner % 16 or outer % 16:
        raise UserError(
            f"weights: fp8 needs projections whose sizes are multiples of 16, not {inner} to {outer}; {WAY_OUT}"
        )
