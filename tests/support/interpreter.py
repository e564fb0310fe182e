"""Where Triton's kernels run in tests: on the GPU where there is one, in Triton's interpreter on every other machine.

The interpreter is chosen when Triton is first imported, so `choose_interpreter` comes before everything else. It runs
no kernel faster: a launch patches `triton.language` and restores it at its end, but Triton 3.9 patches it once more at
every call of a device function inside the launch and never restores that. Each call adds a layer around every
operation, so the time of a launch grows with the square of its calls. After `hasten_interpreter` the language is
patched once, at the first launch, and stays so: in a process that interprets, nothing else reads it. Triton 3.6 takes
the bounds of a loop as `int` of an array with one element, which NumPy refuses since 2.5; that is set right as well.

Most of what remains is spent around NumPy, not in it: on the types and shapes of values and on the arguments of calls.
They are the same few again and again, so each is computed once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

DEVICES = ("nvidia[0-9]*", "dxg", "kfd")
"""Device files of CUDA, CUDA in WSL and ROCm. PyTorch could answer as well but takes seconds to import."""


def choose_interpreter() -> None:
    """Use the interpreter in this process and its children, unless there is a GPU or the user has chosen."""
    has_gpu = any(any(Path("/dev").glob(device)) for device in DEVICES)
    if not has_gpu or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        os.environ.setdefault("TRITON_INTERPRET", "1")


@cache
def hasten_interpreter() -> None:
    """Patch at the first launch only; do nothing if Triton is not installed."""
    pytest.importorskip("triton")
    from triton import knobs, language
    from triton.runtime import interpreter

    if not knobs.runtime.interpret:
        return
    patch = interpreter._patch_lang
    # Kernels refer to the language; Triton's own device functions (`tl.sum`) refer to its core.
    sees_all = SimpleNamespace(__globals__={"tl": language, "core": language.core})

    interpreter._patch_attr = call_directly(language.core, interpreter.interpreter_semantic)

    @cache
    def patch_all() -> None:
        patch(sees_all)
        language.core.tensor.__index__ = lambda self: int(self.handle.data.item())

    def patch_once(fn: Any) -> Any:
        patch_all()
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    remember_types(language.core)
    remember_promotions(type(interpreter.interpreter_semantic))
    # Integer overflow is computed at every operation but reported only in a mode that is off.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)


def by_name(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's dtype for Triton's, looked up once; Triton builds a table for each value. Its types are not hashable."""
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = numpy_dtype(dtype)
        return known[dtype.name]

    return look_up


def call_directly(core: Any, semantic: Any) -> Callable[..., None]:
    """Replaces `_patch_attr`: one call around a builtin of the language; Triton makes two and copies keywords."""

    def function(_semantic: Any = None) -> None: ...

    wrapper_code = core.builtin(function).__code__

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is wrapper_code else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(owner, name, call)

    return patch_attr


def remember_types(core: Any) -> None:
    """Check a block's shape and wrap it in Triton's own types once, not for every value of that type."""
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    tensors: dict[str, dict[str, Any]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        key = (element_ty.name, sizes)
        if key not in blocks:
            make_block(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = vars(self).copy()
        vars(self).update(tensors[type.name], handle=handle, type=type)

    unwrap = core._unwrap_if_constexpr

    def unwrap_what_is_wrapped(value: Any) -> Any:
        return value if value.__class__ in (core.tensor, core.dtype, int) else unwrap(value)

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    core._unwrap_if_constexpr = unwrap_what_is_wrapped


def remember_promotions(semantic: Any) -> None:
    """The type of a result by the types of its operands; operands of equal shape need no broadcast."""
    broadcast, promote = semantic.broadcast_impl_value, semantic.computation_type_impl
    promoted: dict[tuple[Any, ...], Any] = {}

    def broadcast_if_needed(self: Any, left: Any, right: Any) -> Any:
        shapes = [value.type.shape if value.type.is_block() else None for value in (left, right)]
        return (left, right) if shapes[0] is shapes[1] else broadcast(self, left, right)

    def promote_once(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
        if key not in promoted:
            promoted[key] = promote(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return promoted[key]

    semantic.broadcast_impl_value, semantic.computation_type_impl = broadcast_if_needed, promote_once
