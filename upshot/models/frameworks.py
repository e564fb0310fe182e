"""PyTorch and transformers, imported where the first model is made and not before."""

from __future__ import annotations

import atexit
import gc
import sys

from upshot.core.threads import settle_threads


def import_frameworks() -> None:
    """Import what every model in this process needs, without looking for garbage meanwhile.

    Imports make a million objects that stay. Collecting between them (a thousand times) took an eighth of their time,
    and scanning them again in every later collection would be wasted too, hence `freeze`.
    """
    if "transformers.modeling_utils" in sys.modules:
        return
    settle_threads()
    collecting = gc.isenabled()
    gc.disable()
    try:
        import torch
        import transformers.modeling_utils

        assert torch and transformers
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # what stays frozen to the end is reported as leaked by triton's bindings
        if collecting:
            gc.enable()
