"""The functions of `plain` as Triton kernels, under the same names; the learner's lean forward imports one or other."""

from __future__ import annotations

from upshot.engine.kernels.gate import gate as gate
from upshot.engine.kernels.gate import gate_backward as gate_backward
from upshot.engine.kernels.logprobs import token_logprobs as token_logprobs
from upshot.engine.kernels.logprobs import token_logprobs_backward as token_logprobs_backward
from upshot.engine.kernels.norm import add_norm as add_norm
from upshot.engine.kernels.norm import norm_backward as norm_backward
from upshot.engine.kernels.rotary import rotate_heads as rotate_heads
from upshot.engine.kernels.rotary import rotate_heads_backward as rotate_heads_backward
