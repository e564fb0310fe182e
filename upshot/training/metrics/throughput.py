"""How fast a step was on this machine: tokens a second, share of the device's peak, memory. All under `time/`."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from upshot.rollout.reply import Rollout

PEAK = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "A10G": 70, "4090": 165, "3090": 71}
"""TFLOP/s of dense bfloat16, by a part of the device's name."""


class ThroughputMeter:
    """Measures the learner of a model."""

    def __init__(self, module: Any, devices: int = 1) -> None:
        self.device = module.device
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        tied = head is not None and head.weight is embedding.weight
        looked_up = [] if tied else [embedding.weight]
        multiplied = [p for p in module.parameters() if p.ndim >= 2 and not any(p is other for other in looked_up)]
        # Two operations a weight forward, two for the gradient of what it reads, two for its own where it is trained.
        self.flops = sum((6 if p.requires_grad else 4) * p.numel() for p in multiplied)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        tera = next((tera for part, tera in PEAK.items() if part in name), 0)
        self.peak = devices * tera * 1e12 if module.dtype in (torch.bfloat16, torch.float16) else 0.0

    def learned(self, tokens: int, seconds: float) -> dict[str, float]:
        """How fast tokens were learned, and with which share of the device's peak where that is known."""
        times = {"time/learn": seconds}
        if tokens and seconds > 0:
            times["time/learned_per_s"] = tokens / seconds
            if self.peak:
                times["time/mfu"] = tokens * self.flops / seconds / self.peak
        return times

    def step_times(self, started: float) -> dict[str, float]:
        """Seconds since a step `started`, and the peak of the device's memory since the last call, in GiB; on the CPU
        that of the process so far."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"time/step": time.perf_counter() - started, "time/memory_gib": peak / 2**30}


def all_finite(weights: Sequence[torch.Tensor]) -> bool:
    """Whether no weight is NaN or infinite."""
    return not weights or bool(torch.stack([weight.detach().isfinite().all() for weight in weights]).all())


def count_sampled(replies: Iterable[Rollout]) -> int:
    """Tokens that the policy sampled for replies and their futures."""
    count = 0
    for reply in replies:
        turns = (turn for future in reply.futures for turn in future.conversation.turns[future.shared :])
        samples = [*reply.samples(), *(turn.sample for turn in turns if turn.sample is not None)]
        count += sum(len(sample.ids) for sample in samples)
    return count
