"""Adapters merged into weights, so that LoRA (rsLoRA, DoRA) samples as fast as a model without adapters.

Drivers look up all weights through `Weights`. By default, merged weights are the engine's own copy, and the model's
weights stay unchanged for the learner and the reference. If there is no memory for a copy, merged weights can replace
the model's while only the engine uses it (`in place`); they are restored bit for bit from a copy in host memory.
W + scale × B × A is computed in float32 and rounded once to the model's dtype, after every change of the weights. Other
adapters are called as modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from upshot.engine.llama.eight_bit import Joined8, Linear8, Projections8, check_projections, quantize_together
from upshot.engine.llama.linear import OneWeight, Projections
from upshot.engine.llama.lora import (
    adapters_of,
    base_module,
    base_weight,
    can_merge,
    is_plain,
    merge_chunks,
    own_module,
)

Merging = Literal["copy", "in place", "never"]


def write_merged(module: Any, out: Tensor) -> None:
    """Write the module's weight with its adapters merged to `out`, which may be that weight itself."""
    base, parts = base_weight(module), adapters_of(module)
    with torch.no_grad():
        if not parts:
            out.copy_(base)
        for rows, merged in merge_chunks(base, parts):
            out[rows].copy_(merged)


class MergedWeight:
    """A copy of several projections' weights [rows, columns] with their adapters merged; with `narrow`, in 8 bits with
    one scale, for products in `dtype`. Its address stays the same, because CUDA graphs read it."""

    def __init__(self, modules: Sequence[Any], dtype: torch.dtype, narrow: bool = False) -> None:
        if narrow:
            check_projections(modules)
        self.modules, self.dtype = modules, dtype
        self._bases = list(map(base_module, modules))
        rows, columns = sum(_shape(module)[0] for module in modules), _shape(modules[0])[1]
        device = self._bases[0].weight.device
        self.weight = torch.empty(rows, columns, dtype=torch.float8_e4m3fn if narrow else dtype, device=device)
        self.scale = torch.empty(1, device=device) if narrow else None
        bias = getattr(self._bases[0], "bias", None)
        self.bias = None if bias is None else torch.empty(rows, dtype=dtype, device=device)
        self.refresh()

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """Each projection's part of the weight."""
        return self.weight.split([_shape(module)[0] for module in self.modules])

    def refresh(self) -> None:
        """Merge the adapters' present values."""
        refresh_all([self])

    def merge(self) -> None:
        """Bring up to date what is not in 8 bits."""
        if self.scale is None:
            for module, out in zip(self.modules, self.rows, strict=True):
                write_merged(module, out)
        if self.bias is not None:
            torch.cat([base.bias.detach() for base in self._bases], out=self.bias)


def refresh_all(held: Sequence[OneWeight | BorrowedWeight]) -> None:
    """Bring weights up to date, those in 8 bits together."""
    merged = [weight for weight in held if isinstance(weight, MergedWeight)]
    if narrow := [(w.modules, w.rows, w.scale) for w in merged if w.scale is not None]:
        quantize_together(narrow)
    for weight in held:
        if isinstance(weight, MergedWeight):
            weight.merge()
        else:
            weight.refresh()


def _shape(module: Any) -> tuple[int, int]:
    """Rows and columns of the weight; the shape of a quantized tensor does not tell."""
    if isinstance(module, torch.nn.Embedding) or "Embedding" in type(module).__name__:
        rows, columns = base_weight(module).shape
        return rows, columns
    return module.out_features, module.in_features


class BorrowedWeight:
    """A projection's own weight with its adapter merged in place, until `give_back`."""

    def __init__(self, module: Any, originals: dict[int, Tensor]) -> None:
        self.module = module
        self.weight: Tensor = module.get_base_layer().weight.detach()
        if id(module) not in originals:
            kept = torch.empty_like(self.weight, device="cpu", pin_memory=self.weight.device.type == "cuda")
            originals[id(module)] = kept.copy_(self.weight)
        self._original = originals[id(module)]
        self._merged = False
        self.refresh()

    def refresh(self) -> None:
        """Merge the adapters' present values."""
        self.give_back()
        write_merged(self.module, self.weight)
        self._merged = True

    def give_back(self) -> None:
        """Restore the weight."""
        if self._merged:
            self.weight.copy_(self._original, non_blocking=True)
        self._merged = False


class Weights:
    """The weights of projections, embedding and head that a driver reads: the model's own tensors, or merged ones.

    A frozen model whose adapters add nothing (a copy of the policy before its first step) is read without merging, so
    that it shares its weights with the policy.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype,
        merge: Merging,
        originals: dict[int, Tensor],
        narrow: bool = False,
    ) -> None:
        self.dtype, self.merge = dtype, merge
        self.narrow = narrow
        """Whether the projections of blocks are read in 8 bits."""
        self.originals = originals
        """Host copies of weights that are merged in place; made once, as weights below an adapter are not trained."""
        self.layers = [m for m in model.modules() if hasattr(m, "lora_variant")]
        """All modules with adapters."""
        counts = Counter(id(m.weight) for m in model.modules() if is_plain(m))
        self._tied = {weight for weight, count in counts.items() if count > 1}
        """Weights of two modules (embedding and head): the adapter of one must not change the other."""
        self.trained = any(p.requires_grad for p in model.parameters())
        self.held: list[OneWeight | BorrowedWeight] = []
        """Joined, merged and borrowed weights, which `refresh` brings up to date."""
        self.shares = self._may_share()
        """Whether adapters are ignored because they add nothing."""

    def _may_share(self) -> bool:
        if not self.layers or self.merge != "copy" or self.trained or self.narrow:
            return False
        parts = [part for m in self.layers if can_merge(m) for part in adapters_of(m)]
        adds_nothing = all(p.magnitude is None and not (p.up.any() and p.down.any()) for p in parts)
        return adds_nothing and all(map(can_merge, self.layers))

    @property
    def outdated(self) -> bool:
        """Whether `shares` has changed; then every projection must be looked up again."""
        return self.shares != self._may_share()

    def together(self, modules: Sequence[Any]) -> Projections:
        """Projections of one input, joined if possible."""
        if self.narrow:
            return self._narrow(modules)
        targets = [self._target(module) for module in modules]
        merged = not all(map(is_plain, targets)) and self.merge == "copy" and all(map(can_merge, targets))
        projections = Projections(targets, MergedWeight(targets, self.dtype) if merged else None)
        if projections.joined is not None:
            self.held.append(projections.joined)
            self._lend(modules)
        return projections

    def _narrow(self, modules: Sequence[Any]) -> Projections8:
        inner = [own_module(module) for module in modules]
        frozen = isinstance(inner[0], Linear8)
        joined = Joined8(inner, self.dtype) if frozen else MergedWeight(inner, self.dtype, narrow=True)
        self.held.append(joined)
        return Projections8(inner, joined)

    def single(self, module: Any) -> Any:
        """A projection of a block with an input of its own (o, down)."""
        return self._narrow([module]) if self.narrow else self.alone(module)

    def alone(self, module: Any) -> Any:
        """A projection, an embedding or the head, as a plain module if possible; other modules are called."""
        target = self._target(module)
        if is_plain(target):
            self._lend([module])
            return target
        if self.merge != "copy" or not can_merge(target):
            return target
        merged = MergedWeight([target], self.dtype)
        self.held.append(merged)
        # A plain module around the merged weight; it is not part of the model.
        rows, columns = merged.weight.shape
        plain: torch.nn.Module
        if "Embedding" in type(target).__name__:
            plain = torch.nn.Embedding(rows, columns, device="meta")
        else:
            plain = torch.nn.Linear(columns, rows, bias=merged.bias is not None, device="meta")
        plain.weight = torch.nn.Parameter(merged.weight, requires_grad=False)
        if merged.bias is not None:
            plain.bias = torch.nn.Parameter(merged.bias, requires_grad=False)
        return plain

    def _target(self, module: Any) -> Any:
        """The module to read: the plain one below an adapter that adds nothing or is merged in place, else itself."""
        inner = own_module(module)
        if is_plain(inner) or not (self.shares or self.merge == "in place") or not can_merge(inner):
            return inner
        below = inner.get_base_layer()
        if not is_plain(below) or (self.merge == "in place" and id(below.weight) in self._tied):
            return inner
        return below

    def _lend(self, modules: Sequence[Any]) -> None:
        """Merge adapters in place if that is asked for."""
        if self.merge == "in place":
            self.held += [BorrowedWeight(m, self.originals) for m in map(own_module, modules) if not is_plain(m)]

    def release(self) -> None:
        """Restore weights that were merged in place, and drop the engine's own."""
        for held in self.held:
            if isinstance(held, BorrowedWeight):
                held.give_back()
        self.held.clear()

    def pointers(self) -> list[int]:
        """Addresses of merged weights, which CUDA graphs read."""
        return [held.weight.data_ptr() for held in self.held if isinstance(held, MergedWeight)]


def unmerged_weights() -> Weights:
    """Weights that read every module as it is."""
    return Weights(torch.nn.Module(), torch.float32, "never", {})
