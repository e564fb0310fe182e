"""What a GPU knows of every slot: its pages, last id, position and sampling rules."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch

from upshot.engine.kernels.sample import SlotRules
from upshot.engine.sequence import Sequence


def upload(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on the device; every row begins at a multiple of 16 bytes, else kernels are compiled twice."""
    width = numbers.shape[-1]
    if numbers.ndim == 2 and width % 4:
        numbers = np.pad(numbers, ((0, 0), (0, -width % 4)))
    host = torch.from_numpy(np.ascontiguousarray(numbers))
    there = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    return there[..., :width]


class DeviceSlots:
    """The state of `count` slots, on the device; the slot behind the last one belongs to nobody."""

    def __init__(self, count: int, columns: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.table = torch.zeros(count + 1, columns, dtype=torch.int32, device=device)
        """The pages of each slot."""
        self.tokens = torch.zeros(count + 1, dtype=torch.int64, device=device)
        self.place = torch.zeros(count + 1, dtype=torch.int32, device=device)
        self.rules = SlotRules(count + 1, device)
        self._holder: list[tuple[Any, int, int]] = [(None, 0, 0)] * (count + 1)
        """Per slot: the list of pages that is on the device (one list an admission), how many of them, and the last."""

    def sync(self, seqs: list[Sequence]) -> None:
        """Bring the pages and rules of these sequences' slots up to date."""
        holder = self._holder
        stale = []
        for seq in seqs:
            pages = seq.pages
            have = holder[seq.slot]
            if have[0] is not pages or have[1] != len(pages) or have[2] != pages[-1]:
                stale.append(seq)
        if not stale:
            return
        values = array("i")
        fresh: list[Sequence] = []
        columns = self.table.shape[1]
        ends: list[int] = []
        counts: list[int] = []
        for seq in stale:
            pages = seq.pages
            have = holder[seq.slot]
            start = max(0, have[1] - 1) if have[0] is pages else 0
            if have[0] is not pages:
                fresh.append(seq)
            values.fromlist(pages[start:])
            ends.append(seq.slot * columns + len(pages))
            counts.append(len(pages) - start)
            holder[seq.slot] = (pages, len(pages), pages[-1])
        behind = np.array(ends) - np.cumsum(counts)
        cells = np.arange(len(values)) + np.repeat(behind, counts)
        index, value = upload(np.stack([cells, np.array(values)]), self.device)
        self.table.view(-1).index_copy_(0, index, value.int())
        if fresh:
            self._send_rules(fresh)

    def _send_rules(self, seqs: list[Sequence]) -> None:
        rules = [s.rules for s in seqs]
        slots, seeds = upload(np.array([[s.slot for s in seqs], [r.seed for r in rules]], dtype=np.int64), self.device)
        cuts = np.array([[r.temperature, r.top_p, r.min_p, r.top_k] for r in rules], dtype=np.float32)
        numbers = upload(cuts.T, self.device)
        self.rules.seeds.index_copy_(0, slots, seeds)
        self.rules.temperature.index_copy_(0, slots, numbers[0])
        self.rules.top_p.index_copy_(0, slots, numbers[1])
        self.rules.min_p.index_copy_(0, slots, numbers[2])
        self.rules.top_k.index_copy_(0, slots, numbers[3].int())
