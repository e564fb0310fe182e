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

from upshot.engine.decode_plan import HOLDS, OPEN, DecodeTiles, plan_reads
from upshot.engine.kernels.decode import DecodePlan
from upshot.engine.kernels.sample import SlotRules
from upshot.engine.sequence import Sequence

BUCKETS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
"""Rows of a decode step that is captured."""


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
        state = np.array([[s.slot, s.rules.seed, s.ids[-1], len(s.ids) - 1] for s in seqs], dtype=np.int64)
        slots, seeds, tokens, places = upload(state.T, self.device)
        # A prefill step overwrites both when it samples; a fork of a running sequence is never prefilled.
        self.tokens.index_copy_(0, slots, tokens)
        self.place.index_copy_(0, slots, places.int())
        cuts = np.array([[r.temperature, r.top_p, r.min_p, r.top_k] for r in rules], dtype=np.float32)
        numbers = upload(cuts.T, self.device)
        self.rules.seeds.index_copy_(0, slots, seeds)
        self.rules.temperature.index_copy_(0, slots, numbers[0])
        self.rules.top_p.index_copy_(0, slots, numbers[1])
        self.rules.min_p.index_copy_(0, slots, numbers[2])
        self.rules.top_k.index_copy_(0, slots, numbers[3].int())


class DecodeBatch:
    """The rows of the last decode step; they stay while nobody comes or goes (the scheduler passes the same list)."""

    def __init__(self, slots: DeviceSlots, page_size: int, tiles: DecodeTiles) -> None:
        self.count, self.device, self.page_size, self.tiles = slots.count, slots.device, page_size, tiles
        self.rows: list[Sequence] = []
        self.bucket = 0
        """Rows of the step's shape: these, and some that are nobody's."""
        self.launches = 0
        """Sizes of pieces in the plan: none (each row alone), narrow ones, wide ones beside them."""
        self.cuts = self.masked = False
        self.tops = 0
        """The most likely ids that any row asks for."""
        self._left = 0
        """Steps for which the plan holds."""
        self.slots = self._numbers(self.count + 1, value=self.count)
        narrow, wide, _ = tiles.rooms(self.count + 1)
        self._narrow, self._wide = self._numbers(narrow, 3 + tiles.narrow), self._numbers(wide, 3 + tiles.wide)
        self._rows = self._numbers(self.count + 1, 2)
        whole = np.full((self.count + 1, 3 + tiles.narrow), -1, dtype=np.int32)
        whole[:, :3], whole[:, 3] = (0, OPEN, 0), np.arange(self.count + 1)
        self._alone = upload(whole, self.device).contiguous(), self._numbers(self.count + 1, 2, value=1)

    def _numbers(self, *size: int, value: int = 0) -> Tensor:
        return torch.full(size, value, dtype=torch.int32, device=self.device)

    def holds(self, rows: list[Sequence]) -> bool:
        """Whether these are the rows, and the plan is good for one more step."""
        self._left -= 1
        return rows is self.rows and self._left > 0

    def change(self, rows: list[Sequence]) -> None:
        """Other rows, or longer ones: send their slots, and what is read for whom."""
        n = len(rows)
        self.bucket = min(next((b for b in BUCKETS if b >= n), n), self.count + 1)
        self.cuts = any(s.rules.cuts for s in rows)
        self.masked = any(s.grammar is not None for s in rows)
        self.tops = max(s.rules.top_logprobs for s in rows)
        slots = np.full(self.count + 1, self.count, dtype=np.int32)
        slots[:n] = [s.slot for s in rows]
        self.slots.copy_(upload(slots, self.device))
        reads = plan_reads(rows, self.page_size, self.tiles)
        self.launches = 0 if reads is None else 1 + (len(reads.wide) > 0)
        if reads is not None:
            rooms = *self.tiles.rooms(self.bucket)[:2], self.bucket
            for table, here, room in zip((reads.narrow, reads.wide, reads.parts), self._tables, rooms, strict=True):
                wide = np.zeros((room, table.shape[1]), dtype=np.int32)
                wide[: len(table)] = table
                here[:room].copy_(upload(wide, self.device))
        self.rows, self._left = rows, HOLDS

    @property
    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._narrow, self._wide, self._rows

    def plan(self, bucket: int, launches: int) -> DecodePlan:
        """What is read for whom among the first `bucket` rows."""
        if not launches:
            return DecodePlan(self._alone[0][:bucket], None, self._alone[1], 0)
        narrow, wide, parts = self.tiles.rooms(bucket)
        return DecodePlan(self._narrow[:narrow], self._wide[:wide] if launches > 1 else None, self._rows, parts)

    @contextmanager
    def nobody(self) -> Iterator[None]:
        """Meanwhile the rows are nobody's: a step that is being captured moves no sequence on."""
        slots = self.slots.clone()
        self.slots.fill_(self.count)
        try:
            yield
        finally:
            self.slots.copy_(slots)
