"""Reads PEFT's adapters: which ones a module has, what they add to its weight, and the weight itself.

The engine merges low-rank adapters into weights (merged.py); the learner computes them as separate products
(training/learner/forward/lora_linear.py). Both call other adapters as modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

KINDS = ("Linear", "Embedding", "Linear4bit")
CHUNK = 1 << 24
"""Elements merged at a time: 64 MiB in float32, to bound the temporary memory."""


class Adapter(NamedTuple):
    """A low-rank adapter: it adds scale × up [rows, rank] × down [rank, columns] to a weight [rows, columns].

    `magnitude` [rows]: DoRA's norms of the rows of the result.
    """

    up: Tensor
    down: Tensor
    scale: float
    magnitude: Tensor | None = None


def own_module(module: Any) -> Any:
    """The module that computes: for a module that PEFT trains as a whole (modules_to_save), its trained copy."""
    saved = getattr(module, "modules_to_save", None)
    active = getattr(module, "active_adapters", None)
    if saved is None or not active or module.disable_adapters:
        return module
    return saved[active[0]] if len(active) == 1 and active[0] in saved else module


def is_plain(module: Any) -> bool:
    """Whether the module is a projection or an embedding without an adapter."""
    return type(module) in (torch.nn.Linear, torch.nn.Embedding)


def can_merge(module: Any) -> bool:
    """Whether the module is plain, or has adapters that can be merged into its weight."""
    if is_plain(module):
        return True
    kind = type(module)
    if not kind.__module__.startswith("peft.tuners.lora") or kind.__name__ not in KINDS:
        return False
    if kind.__name__ == "Embedding" and not is_plain(module.get_base_layer()):
        return False  # it does more than look up (Gemma's also multiplies)
    if getattr(module, "fan_in_fan_out", False) or module.merged or any(module.lora_bias.values()):
        return False
    active = _active(module)
    odd = [module.lora_variant[name] for name in active if name in module.lora_variant]
    if not odd:
        return True
    return len(active) == 1 and type(odd[0]).__name__ == "DoraLinearVariant"


def _active(module: Any) -> list[str]:
    factors = module.lora_embedding_A if "Embedding" in type(module).__name__ else module.lora_A
    return [name for name in module.active_adapters if name in module.scaling and name in factors]


def adapters_of(module: Any) -> list[Adapter]:
    """The active adapters of a module; none if they are switched off."""
    if is_plain(module) or module.disable_adapters:
        return []
    adapters = []
    for name in _active(module):
        if "Embedding" in type(module).__name__:
            up, down = module.lora_embedding_A[name].T, module.lora_embedding_B[name].T
        else:
            up, down = module.lora_B[name].weight, module.lora_A[name].weight
        magnitude = module.lora_magnitude_vector[name].weight if name in getattr(module, "lora_variant", {}) else None
        adapters.append(Adapter(up, down, float(module.scaling[name]), magnitude))
    return adapters


def linear_below(module: Any) -> torch.nn.Linear | None:
    """The plain projection that a module is or that its LoRA layer wraps; None for other modules."""
    if type(module) is torch.nn.Linear:
        return module
    if type(module).__module__ == "peft.tuners.lora.layer" and type(module).__name__ == "Linear":
        base = module.base_layer
        return base if type(base) is torch.nn.Linear and not module.fan_in_fan_out else None
    return None


def separate_adapters(module: Any) -> list[Adapter] | None:
    """The adapters of a `linear_below` that can be computed as separate products; None if only the module itself can
    compute them (DoRA, dropout …)."""
    if is_plain(module) or (module.merged and not module.disable_adapters):
        return []
    if module.disable_adapters:
        return None if module.merged else []  # only the module can take a merged adapter out again
    for name in _active(module):
        odd = name in getattr(module, "lora_variant", {}) or getattr(module, "use_dora", {}).get(name, False)
        dropout = module.lora_dropout[name]
        if odd or module.lora_B[name].bias is not None or (dropout.training and getattr(dropout, "p", 0.0) > 0):
            return None
    return adapters_of(module)


def base_module(module: Any) -> Any:
    """The module below the adapters."""
    return module if is_plain(module) else module.get_base_layer()


def base_weight(module: Any) -> Tensor:
    """The weight below the adapters, dequantized if it is quantized."""
    base = base_module(module)
    if is_plain(base):
        return base.weight.detach()
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(base).detach()


def merge_chunks(base: Tensor, parts: list[Adapter]) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of rows of a weight with its adapters merged, in float32; no chunks if there are no adapters."""
    size = max(1, CHUNK // base.shape[1])
    for at in range(0, len(base) if parts else 0, size):
        rows = slice(at, at + size)
        whole = base[rows].float()
        for part in parts:
            whole = torch.addmm(whole, part.up[rows].float(), part.down.float(), alpha=part.scale)
            if part.magnitude is not None:
                whole *= (part.magnitude[rows].float() / whole.norm(dim=1))[:, None]
        yield rows, whole
