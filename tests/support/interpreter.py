"""A pytest plugin that makes Triton's interpreter several times as fast, for the checks of kernels.

A launch patches `triton.language` and restores it at its end. Triton 3.9 patches it once more at every call of a
device function inside the launch and never restores that: each call adds a layer around every operation, so the time
of a launch grows with the square of its calls. Here a launch patches all that its device functions can see, once.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def pytest_configure() -> None:
    """Patch at launches only."""
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    # Kernels name the language; Triton's own device functions (`tl.sum`) name its core.
    sees_all = SimpleNamespace(__globals__={"tl": language, "core": language.core})

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang = lambda fn: patch(sees_all)
    interpreter.InterpretedFunction.__call__ = call
