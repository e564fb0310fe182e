"""The embedded inference engine: paged KV with forks, continuous batching, kernels, sampler, server.

It drives the learner's own `torch.nn.Module`: one set of weights. It knows ids, not text:
messages and tokenizers are `EngineModel`'s.
"""

from __future__ import annotations
