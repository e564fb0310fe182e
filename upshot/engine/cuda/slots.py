"""What a GPU knows of the sequences: of every slot its pages, last id, position and sampling rules, and who decodes.

It stays on the device from step to step, so that a step can begin before the host has seen the ids of the last one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upshot.engine.decode_rows import MIN_SHARERS, find_shared
from upshot.engine.kernels.decode import MEMBERS, SharedPrefixes
from upshot.engine.kernels.sample import SlotRules
from upshot.engine.sequence import Sequence


def upload(numbers: np.ndarray, device: torch.device) -> Tensor:
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
            # Pages are appended, and the last one is replaced when it was shared: nothing else ever changes in a list.
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


class DecodeBatch:
    """The rows of the last decode step; they stay while nobody comes or goes (the scheduler passes the same list)."""

    def __init__(self, slots: DeviceSlots, page_size: int) -> None:
        self.count, self.device, self.page_size = slots.count, slots.device, page_size
        self.rows: list[Sequence] = []
        self.shares = self.cuts = self.masked = False
        self.tops = 0
        """The most likely ids that any row asks for."""
        self.slots = self._numbers(self.count + 1, self.count)
        groups = self.count // MIN_SHARERS + 1
        self._shared = SharedPrefixes(
            self._numbers(groups, 0),
            self._numbers(groups, 0),
            self._numbers(groups * MEMBERS, -1).view(groups, MEMBERS),
            self._numbers(self.count + 1, 0),
        )

    def _numbers(self, count: int, value: int) -> Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=self.device)

    def change(self, rows: list[Sequence]) -> None:
        """Other rows: send their slots, and who shares a prefix."""
        n = len(rows)
        self.cuts = any(s.rules.cuts for s in rows)
        self.masked = any(s.grammar is not None for s in rows)
        self.tops = max(s.rules.top_logprobs for s in rows)
        slots = np.full(self.count + 1, self.count, dtype=np.int32)
        slots[:n] = [s.slot for s in rows]
        self.slots.copy_(upload(slots, self.device))
        groups, starts = find_shared(rows, self.page_size, MEMBERS)
        self.shares = bool(groups)
        if groups:
            total = len(self._shared.prefix)
            head = np.zeros((2, total), dtype=np.int32)
            members = np.full((total, MEMBERS), -1, dtype=np.int32)
            for index, (leader, length, part) in enumerate(groups):
                head[:, index] = rows[leader].slot, length
                members[index, : len(part)] = part
            own = np.zeros(self.count + 1, dtype=np.int32)
            own[:n] = starts
            heads = upload(head, self.device)
            self._shared.leaders.copy_(heads[0])
            self._shared.prefix.copy_(heads[1])
            self._shared.members.copy_(upload(members, self.device))
            self._shared.starts.copy_(upload(own, self.device))
        self.rows = rows

    def shared(self, bucket: int) -> SharedPrefixes:
        """Who shares a prefix among the first `bucket` rows."""
        groups, all_ = bucket // MIN_SHARERS, self._shared
        return SharedPrefixes(all_.leaders[:groups], all_.prefix[:groups], all_.members[:groups], all_.starts)

    @contextmanager
    def nobody(self) -> Iterator[None]:
        """Meanwhile the rows are nobody's: a step that is being captured moves no sequence on."""
        slots, starts = self.slots.clone(), self._shared.starts.clone()
        self.slots.fill_(self.count)
        self._shared.starts.zero_()
        try:
            yield
        finally:
            self.slots.copy_(slots)
            self._shared.starts.copy_(starts)
