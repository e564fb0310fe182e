"""The rows of decode steps on a GPU: which slots, who shares a prefix, what sampling they ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from upshot.engine.cuda.slots import DeviceSlots, upload
from upshot.engine.kernels.decode import MEMBERS, SharedPrefixes
from upshot.engine.sequence import Sequence
from upshot.engine.sharing import MIN_SHARERS, find_shared


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

    def _numbers(self, count: int, value: int) -> torch.Tensor:
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
