"""Kernels of engine and learner, one file a family; `plain` has the same functions in PyTorch's own operations.

- norm, gate, rotary, logprobs: what lies between a Llama block's products and behind its head, there and back
- decode (and decode_fused), prefill: attention over paged keys and values; sample: ids from logits
- long (and long_rows): attention of long runs of queries by cuDNN, for engine and learner
- segment_sum: gradients of keys that several sequences read; exact: forms that do not depend on the batch
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from upshot.engine.kernels import plain


def kernels_for(x: Tensor) -> Any:
    """The functions of `plain` for the device of a tensor: Triton's on a GPU, PyTorch's own elsewhere."""
    if not x.is_cuda:
        return plain
    from upshot.engine.kernels import gpu

    return gpu
