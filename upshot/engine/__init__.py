"""The embedded inference engine: paged KV cache with prefix sharing, continuous batching, CUDA graphs and sampling.

It drives the learner's own `torch.nn.Module`, so sampler and learner share one set of weights. It works on token ids;
`models/engine_model.py` calls it and owns text, messages and tokenizers.

Read in this order: `engine.py` (API and step loop), `scheduler.py` (what the next step computes), `sequence.py`,
`pages.py` (KV pages and the prefix cache), then one runner, which executes a planned step: `cpu/runner.py` in plain
PyTorch or `cuda/runner.py` with CUDA graphs. `llama/` turns ids into logits, `kernels/` holds the Triton kernels of
engine and learner, `exact/` the bitwise reproducible mode.

Words used in all files:

- id: a token id. Sequence: one prompt with one continuation. Row: one sequence in the batch of a decode step.
- page: a block of `page_size` KV entries. Cell: one entry, numbered page × page_size + offset.
- slot: a running sequence's index into the state kept on the device (page table, last id, position, sampling rules).
- step: one forward pass, either prefill (chunks of prompts) or decode (one id for every row).
- version: how often the weights have changed.
"""

from __future__ import annotations
