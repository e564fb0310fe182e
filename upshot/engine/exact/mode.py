"""`ExactMode`, a PyTorch dispatch mode that replaces operations by batch-invariant forms. See exact/__init__.py.

It works below autograd, so it sees every operation of a forward however the model's code is written, and the graph for
the backward pass stays as it is. Operations that only move data or round once per element run unchanged. An operation
that is neither known nor has a form here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from upshot.core.errors import UserError
from upshot.engine.exact import blocks


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _names(
    """
    _assert_async _local_scalar_dense _reshape_alias _to_copy _unsafe_view alias amax amin arange argmax argmin cat
    chunk clone constant_pad_nd contiguous copy copy_ detach detach_ embedding empty empty_like expand expand_as fill
    fill_ flatten full full_like gather index index_copy_ index_put index_put_ index_select is_nonzero item lift_fresh
    masked_fill masked_fill_ max min narrow new_empty new_full new_ones new_zeros nll_loss_forward ones ones_like pad
    repeat repeat_interleave reshape scalar_tensor scatter scatter_ searchsorted select slice sort split
    split_with_sizes squeeze stack t to topk transpose tril triu type_as unbind unsqueeze view view_as zeros zeros_like
    """
)
"""Move, compare or convert: no sums, and no rounding that depends on other elements."""
ROUND_ONCE = _names(
    """
    __and__ __or__ abs add add_ bitwise_and bitwise_not bitwise_or ceil clamp clamp_ clamp_max clamp_min div div_ eq
    floor ge gt isfinite isinf isnan le logical_and logical_not logical_or lt maximum minimum mul mul_ ne neg reciprocal
    relu round rsub sign sqrt square sub sub_ where
    """
)
"""Elementwise IEEE arithmetic, which vector and scalar code round alike."""
BY_ROW = _names("_softmax _log_softmax cumsum mean sum native_layer_norm _fused_rms_norm")
"""Sums over the last dimension."""
DECOMPOSED = _names("matmul layer_norm rms_norm softmax log_softmax dropout einsum")
"""Arrive as one operation in inference mode, and decomposed otherwise."""


class ExactMode(TorchDispatchMode):
    """Inside, each row's result depends on that row alone."""

    def __init__(self, kernels: bool) -> None:
        super().__init__()
        self.kernels = kernels
        """Use the GPU's kernels."""
        self._forms: dict[Any, Callable[..., Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation in its exact form."""
        form = self._forms.get(func)
        if form is None:
            form = self._forms[func] = self._form(func)
        return form(*args, **(kwargs or {}))

    def product(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """a [rows, k] × b [k, n] (+ bias)."""
        if self.kernels:
            from upshot.engine.kernels import exact

            return exact.product(a, b, bias)
        return blocks.product(a, b, bias)

    def _form(self, func: Any) -> Callable[..., Any]:
        """The exact form of an operation; called once per operation."""
        name = func.overloadpacket.__name__
        form: Callable[..., Any] | None = getattr(self, f"_op_{name.strip('_')}", None)
        if form is not None:
            return form
        if name in BY_ROW:
            return partial(self._by_row, func)
        if name in DECOMPOSED:
            return partial(self._in_parts, func)
        if name in ("add", "sub", "add_", "sub_", "rsub"):
            return partial(self._add_scaled, func)
        if name in MOVES or name in ROUND_ONCE or func.is_view:
            return func  # type: ignore[no-any-return]
        if torch.Tag.pointwise in func.tags:
            # On a GPU all elements are computed by the same code.
            return func if self.kernels and torch.cuda.is_available() else partial(self._elements, func)
        return partial(self._other, func)

    # --- matrix products

    def _op_mm(self, a: Tensor, b: Tensor) -> Tensor:
        return self.product(a, b)

    def _op_addmm(self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if beta == alpha == 1 and bias.dim() == 1:
            return self.product(a, b, bias)
        return bias * beta + self.product(a, b) * alpha

    def _op_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = self.product(x.reshape(-1, x.shape[-1]), weight.t(), bias)
        return out.view(*x.shape[:-1], len(weight))

    def _op_bmm(self, a: Tensor, b: Tensor) -> Tensor:
        if a.shape[2] == 1:  # the angles of rotary embeddings: products without sums
            return a * b
        return torch.stack([self.product(x, y) for x, y in zip(a, b, strict=True)])

    # --- sums over a row

    def _op_mean(self, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        if not self.kernels or dtype is not None or not _is_last(dim, x):
            return self._by_row(torch.ops.aten.mean.dim, x, dim, keepdim, dtype=dtype)
        from upshot.engine.kernels import exact

        out = exact.mean(x)
        return out.unsqueeze(-1) if keepdim else out

    def _by_row(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not x.is_floating_point():
            return func(x, *args, **kwargs)
        name = func.overloadpacket.__name__
        if name in ("native_layer_norm", "_fused_rms_norm"):
            if len(args[0]) != 1:
                raise self._refusal(func, f"over the shape {list(args[0])}")
            mean_shape = (*x.shape[:-1], 1)
            out, *rest = blocks.by_row(lambda part: tuple(func(part, *args, **kwargs)), x)
            return (out, *(some.view(mean_shape) for some in rest))
        if not args or not _is_last(args[0], x):
            raise self._refusal(func, "over other dimensions than the last")
        more = args[1:]
        if name in ("mean", "sum"):
            keepdim = bool(more[0]) if more else bool(kwargs.pop("keepdim", False))
            out = blocks.by_row(lambda part: func(part, [-1], True, **kwargs), x)
            return out if keepdim else out.squeeze(-1)
        return blocks.by_row(lambda part: func(part, -1, *more, **kwargs), x)

    # --- the rest

    def _elements(self, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [y for y in (*args, *kwargs.values()) if isinstance(y, Tensor)]
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
            return self._other(func, x, *args, **kwargs)
        if tensors or func._schema.is_mutable:
            raise self._refusal(func, "of several tensors, or in place,")
        return blocks.by_element(lambda part: func(part, *args, **kwargs), x)

    def _add_scaled(self, func: Any, a: Any, b: Any, *args: Any, alpha: float = 1, **kwargs: Any) -> Any:
        # a + alpha × b is one fused rounding in vector code and two in scalar code.
        return func(a, b, *args, **kwargs) if alpha == 1 else func(a, b * alpha, *args, **kwargs)

    def _in_parts(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        with self:
            return func.decompose(*args, **kwargs)

    def _other(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Operations on integers are exact anyway; others are refused."""
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in flat):
            raise self._refusal(func)
        return func(*args, **kwargs)

    def _refusal(self, func: Any, what: str = "") -> UserError:
        return UserError(
            f"exact mode has no form of the operation {func} {what}that is independent of the batch; "
            "leave `exact` off for this model"
        )


def _is_last(dim: Any, x: Tensor) -> bool:
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    return len(dims) == 1 and dims[0] % x.dim() == x.dim() - 1
