"""What the learner's forward keeps for its backward, and what a step of the engine needs: numbers to calibrate.

Bytes, by the sizes of a model. `benchmarks/memory_plan.py` compares them with what a GPU measures.
"""

from __future__ import annotations

from typing import Literal

from upshot.training.learner.memory.model_shape import LEAN, ModelShape

Block = Literal["lean", "called", "transformers"]
"""lean: the learner's own block. called: that block, its adapters called as modules of peft (DoRA, 4-bit, dropout).
transformers: the model's own forward, for other families."""
CHUNK_BYTES = 1 << 29
"""The most that a chunk of logits takes in the learner."""
PROMPT_IDS = 16384
"""Prompt ids that the engine reads in one step on a GPU."""
ROWS = 1024
"""Sequences that the engine extends at once on a GPU."""


def block_kind(shape: ModelShape, called: bool) -> Block:
    """How the learner runs the blocks of a model; `called`: its adapters have to be called."""
    if shape.family not in LEAN:
        return "transformers"
    return "called" if called else "lean"


def kept(shape: ModelShape, kind: Block, ranks: int, size: int) -> int:
    """Bytes a token keeps in one layer; `ranks`: of the layer's adapters together, `size`: of the model's numbers."""
    h, a, kv, m = shape.hidden, shape.queries, shape.keys, shape.mlp
    # The residual before each half, queries, keys and values, attention's result, gate and up; its log-sums in float32.
    numbers = 2 * h + 2 * a + 2 * kv + 2 * m + ranks
    if shape.head_norms:
        numbers += a + 2 * kv
    total = numbers * size + 4 * shape.heads
    if kind == "called":  # inputs of the projections once more, in float32 for the adapters
        total += 4 * (5 * h + a + m) + size * (2 * h + m)
    if kind == "transformers":  # norms and their float32 inputs, unrotated queries and keys, gated and ungated parts
        total += size * (2 * h + a + 2 * kv + 2 * m) + 8 * h
    return total


def held(shape: ModelShape, tokens: int, kind: Block, again: bool, ranks: int, size: int) -> int:
    """Bytes that a micro-batch's forward leaves for its backward; `again`: each block is computed again there."""
    layer = shape.hidden * size if again else kept(shape, kind, ranks, size)
    ends = 4 * shape.hidden * size  # embedding, last norm and the gradients of both
    return tokens * (shape.layers * layer + ends)


def at_work(shape: ModelShape, tokens: int, kind: Block, again: bool, ranks: int, size: int, all_trained: bool) -> int:
    """Bytes beside that at the backward's highest: in the head, or in one layer."""
    layer = (3 * shape.mlp + 3 * shape.hidden) * size + (kept(shape, kind, ranks, size) if again else 0)
    return max(head(shape, tokens, size, all_trained), tokens * layer)


def head(shape: ModelShape, tokens: int, size: int, all_trained: bool) -> int:
    """Bytes of the learner's chunks of logits, the last and the next; and the head's gradient, summed in float32."""
    whole = tokens * shape.vocab * size
    chunks = 2 * min(CHUNK_BYTES, whole)
    return chunks + (shape.count("lm_head") * (size + 4 * (whole > CHUNK_BYTES)) if all_trained else 0)


def sampling(shape: ModelShape, size: int) -> int:
    """Bytes that one step of the engine needs, for as many prompt ids as it reads at once."""
    h, a, kv, m = shape.hidden, shape.queries, shape.keys, shape.mlp
    return PROMPT_IDS * (3 * h + 3 * a + 2 * kv + 2 * m) * size


def graphs(shape: ModelShape, size: int) -> int:
    """Bytes that captured steps hold: what the largest needs, and the logits that all of them share."""
    return sampling(shape, size) + ROWS * shape.vocab * size
