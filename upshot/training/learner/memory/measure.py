"""One short micro-batch on the GPU that is there: what a token keeps for the backward, whatever the family."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from upshot.engine.llama.agreement import FAILURES
from upshot.training.learner.batch import Datum, pack
from upshot.training.learner.forward.dropout import without_dropout
from upshot.training.learner.forward.packed import PackedForward
from upshot.training.learner.forward.select import at_rest, checkpointing_of, set_checkpointing, states_of

TOKENS = 256


def measure_kept(module: Any, noise: bool = False, allocated: Callable[[], int] = torch.cuda.memory_allocated) -> int:
    """Bytes that a token keeps in all layers; 0 where that cannot be measured. `noise`: dropout is drawn."""
    before = checkpointing_of(module)  # an earlier phase's choice, with which little would be kept
    try:
        set_checkpointing(module, "none")
        # Two lengths, so that what does not grow with them (workspaces, tables) drops out; the first run warms up.
        _, short, long = (_kept(module, tokens, noise, allocated) for tokens in (TOKENS, TOKENS, 2 * TOKENS))
        return max(0, long - short) // TOKENS
    except (*FAILURES, torch.OutOfMemoryError):
        return 0  # the learner has other forwards to try, and arithmetic refuses what does not fit
    finally:
        set_checkpointing(module, before)


def _kept(module: Any, tokens: int, noise: bool, allocated: Callable[[], int]) -> int:
    words = min(64, module.get_input_embeddings().weight.shape[0])  # an id beyond them would end a GPU's process
    batch = pack([Datum([i % words for i in range(tokens)], [0, *[1] * (tokens - 1)])], module.device)
    forward = PackedForward(module, states_of(module)[0]())
    with at_rest(module), nullcontext(module.train()) if noise else without_dropout(module), forward.open():
        before = allocated()
        hidden = forward.rows(batch)
        after = allocated()
        del hidden
    return after - before
