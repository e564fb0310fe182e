"""Kernels of engine and learner, one file a family; `plain` has the same functions in PyTorch's own operations.

- norm, gate, rotary, logprobs: what lies between a Llama block's products and behind its head, there and back
- decode (and decode_fused), prefill: attention over paged keys and values; sample: ids from logits
- long (and long_rows): attention of long runs of queries by cuDNN, for engine and learner
- segment_sum: gradients of keys that several sequences read; exact: forms that do not depend on the batch
"""
