"""Triton kernels of engine and learner; `plain` has the same functions in PyTorch, as reference and for the CPU.

- norm, gate, rotary, logprobs: the operations between a Llama block's matrix products and after the head, with backward
- decode (and decode_fused), prefill: attention over the paged KV cache; sample: sampling from logits
- long (and long_rows): attention of long runs of queries by cuDNN, for engine and learner
- fp8: products in 8 bits; kv8: keys and values in 8 bits
- segment_sum: gradients of keys that several sequences read; exact: batch-invariant forms
- launch: cheaper launches; gpu: the functions that the learner uses on a GPU

Shapes are written [rows, n]; a program is one instance of a kernel (a CUDA thread block). Offsets into caches, logits
and activations are int64, since 2³¹ elements are reached at long contexts; numbers of rows, pages and positions are
int32.
"""
