"""The functions of `plain` by Triton's kernels, under the same names."""

from __future__ import annotations

from upshot.engine.kernels.gate import gate, gate_backward
from upshot.engine.kernels.logprobs import token_logprobs, token_logprobs_backward
from upshot.engine.kernels.norm import add_norm, norm_backward
from upshot.engine.kernels.rotary import rotate_heads, rotate_heads_backward

__all__ = [
    "add_norm",
    "gate",
    "gate_backward",
    "norm_backward",
    "rotate_heads",
    "rotate_heads_backward",
    "token_logprobs",
    "token_logprobs_backward",
]
