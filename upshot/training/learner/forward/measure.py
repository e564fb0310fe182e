"""How much memory a micro-batch of a loaded model keeps for the backward, measured; computed: `memory/plan.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from upshot.engine.llama.agreement import FAILURES
from upshot.training.learner.batch import Datum, pack
from upshot.training.learner.forward.packed import PackedForward, without_dropout
from upshot.training.learner.forward.select import at_rest, checkpointing_of, set_checkpointing, states_of


def measure_kept(module: Any, noise: bool = False, allocated: Callable[[], int] = torch.cuda.memory_allocated) -> int:
    """Bytes that a token keeps in all layers; 0 where that cannot be measured. `noise`: dropout is drawn."""
    before, words = checkpointing_of(module), min(64, module.get_input_embeddings().weight.shape[0])

    def kept(tokens: int) -> int:
        batch = pack([Datum([i % words for i in range(tokens)], [0, *[1] * (tokens - 1)])], module.device)
        forward, empty = PackedForward(module, states_of(module)[0]()), allocated()
        with nullcontext(module.train()) if noise else without_dropout([*module.modules()]), forward.open():
            hidden = forward.rows(batch)
            after = allocated()
            del hidden
        return after - empty

    try:
        set_checkpointing(module, "none")  # an earlier phase's choice would keep little
        with at_rest(module):
            # Two lengths, so that what does not grow with them (workspaces, joined adapters) drops out; the first run
            # warms up.
            _, short, long = (kept(tokens) for tokens in (256, 256, 512))
        return max(0, long - short) // 256
    except (*FAILURES, torch.OutOfMemoryError):
        return 0  # the learner has other forwards to try, and arithmetic refuses what does not fit
    finally:
        set_checkpointing(module, *before)
