"""Where Triton's kernels run in tests: on the GPU where there is one, in Triton's interpreter on every other machine.

The interpreter is chosen when Triton is first imported, so `choose_interpreter` comes before everything else. It runs
no kernel faster: a launch patches `triton.language` and restores it at its end, but Triton 3.9 patches it once more at
every call of a device function inside the launch and never restores that. Each call adds a layer around every
operation, so the time of a launch grows with the square of its calls. With `hasten_interpreter` a launch patches all
that its device functions can see, once. Triton 3.6 takes the bounds of a loop as `int` of an array with one element,
which NumPy refuses since 2.5; that is set right as well.
"""

from __future__ import annotations

import os
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
    """Patch at launches only; skip the file that asks for it where there is no Triton."""
    pytest.importorskip("triton")
    from triton import knobs, language
    from triton.runtime import interpreter

    if not knobs.runtime.interpret:
        return
    patch = interpreter._patch_lang
    # Kernels name the language; Triton's own device functions (`tl.sum`) name its core.
    sees_all = SimpleNamespace(__globals__={"tl": language, "core": language.core})

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    def patch_all(fn: Any) -> Any:
        scope = patch(sees_all)
        language.core.tensor.__index__ = lambda self: int(self.handle.data.item())
        return scope

    interpreter._patch_lang = patch_all
    interpreter.InterpretedFunction.__call__ = call
