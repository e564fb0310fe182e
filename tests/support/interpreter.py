"""Where Triton's kernels run in tests: on the GPU where there is one, in Triton's interpreter on every other machine.

The interpreter is chosen when Triton is first imported, so `choose_interpreter` comes before everything else. It runs
no kernel faster: a launch patches `triton.language` and restores it at its end, but Triton 3.9 patches it once more at
every call of a device function inside the launch and never restores that. Each call adds a layer around every
operation, so the time of a launch grows with the square of its calls. After `hasten_interpreter` the language is
patched once, at the first launch, and stays so: in a process that interprets, nothing else reads it. Triton 3.6 takes
the bounds of a loop as `int` of an array with one element, which NumPy refuses since 2.5; that is set right as well.
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
"""Files under /dev: CUDA, CUDA in WSL, ROCm. PyTorch would answer, too, but takes seconds to import."""


def choose_interpreter() -> None:
    """Interpret kernels in this process and in those that it starts, unless there is a GPU or the user has chosen."""
    has_gpu = any(any(Path("/dev").glob(device)) for device in DEVICES)
    if not has_gpu or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        os.environ.setdefault("TRITON_INTERPRET", "1")


@cache
def hasten_interpreter() -> None:
    """Patch at the first launch only; skip the file that asks for it where there is no Triton."""
    pytest.importorskip("triton")
    from triton import knobs, language
    from triton.runtime import interpreter

    if not knobs.runtime.interpret:
        return
    patch = interpreter._patch_lang
    # Kernels name the language; Triton's own device functions (`tl.sum`) name its core.
    sees_all = SimpleNamespace(__globals__={"tl": language, "core": language.core})

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
    # An overflow of integers is computed at every operation, and told only in a mode that is off.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)


def by_name(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's dtype of Triton's, looked up once; Triton builds a table for each value. Its types have no hash."""
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = numpy_dtype(dtype)
        return known[dtype.name]

    return look_up
