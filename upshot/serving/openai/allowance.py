"""A share of a GPU's memory for this process: torch enforces it; weights and pages divide it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from upshot.core.errors import UserError

KV_PART = 0.85
"""Share of the memory left by the weights that pages get: the rest is for activations and graphs."""


@dataclass(frozen=True)
class Allowance:
    """How much of a GPU's memory this process may take."""

    share: float
    bytes: int
    gpu: int

    @classmethod
    def hold(cls, share: float, device: Any) -> Allowance:
        """Limit this process to a share of a device's memory; call it before anything is on the device."""
        import torch

        if not 0 < share <= 1:
            raise UserError(f"--memory {share:g}: a share is above 0 and at most 1")
        place = torch.device(device)
        if place.type != "cuda":
            raise UserError(f"--memory is a share of a GPU, and the device is {place}; try --kv-gib")
        gpu = torch.cuda.current_device() if place.index is None else place.index
        torch.cuda.set_per_process_memory_fraction(share, gpu)
        return cls(share, int(share * torch.cuda.mem_get_info(gpu)[1]), gpu)

    def kv_bytes(self) -> int:
        """Bytes for keys and values, now that the weights are loaded."""
        import torch

        weights = torch.cuda.memory_allocated(self.gpu)
        if weights >= self.bytes:
            gib = f"{self.bytes / 2**30:.1f} GiB, and the weights are {weights / 2**30:.1f} GiB"
            raise UserError(f"--memory {self.share:g} is {gib}; give it a larger share")
        return int(KV_PART * (self.bytes - weights))
