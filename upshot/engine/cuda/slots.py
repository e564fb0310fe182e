"""The state of sequences on the device, used by cuda/runner.py: per slot, and for the rows of the decode batch.

A slot has pages, last id, position and sampling rules. They stay on the device from step to step, so that a step can be
launched before the host knows the ids of the last one. All tensors keep their addresses, as CUDA graphs read them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upshot.engine.decode_plan import OPEN, PLAN_STEPS, DecodeTiles, plan_reads
from upshot.engine.kernels.decode import DecodePlan
from upshot.engine.kernels.sample import SlotRules
from upshot.engine.sequence import Sequence

BUCKETS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
"""Batch sizes for which decode steps are captured; a batch is padded to the next one."""


def upload(numbers: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, copied asynchronously from pinned memory.

    Rows of a matrix are padded to multiples of 16 bytes: Triton compiles kernels again for pointers of less alignment.
    """
    width = numbers.shape[-1]
    if numbers.ndim == 2 and width % 4:
        numbers = np.pad(numbers, ((0, 0), (0, -width % 4)))
    host = torch.from_numpy(np.ascontiguousarray(numbers))
    there = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    return there[..., :width]


class DeviceSlots:
    """The state of `count` slots on the device; one more slot, the last, is the dummy that padding rows use.

    The dummy slot's page table is all zeros, so padding writes to page 0, which no sequence has.
    """

    def __init__(self, count: int, columns: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.table = torch.zeros(count + 1, columns, dtype=torch.int32, device=device)
        """[slots, columns] The pages of each slot's sequence."""
        self.tokens = torch.zeros(count + 1, dtype=torch.int64, device=device)
        """[slots] The last id, the input of the next decode step."""
        self.place = torch.zeros(count + 1, dtype=torch.int32, device=device)
        """[slots] The position of that id."""
        self.rules = SlotRules(count + 1, device)
        self._holder: list[tuple[Any, int, int]] = [(None, 0, 0)] * (count + 1)
        """Per slot, what is on the device: the page list (each admission has a new list), its length, its last page."""

    def sync(self, seqs: list[Sequence]) -> None:
        """Copy to the device what has changed in these sequences' pages, and the rules and position of new ones."""
        holder = self._holder
        stale = []
        for seq in seqs:
            pages = seq.pages
            have = holder[seq.slot]
            # A page list changes in two ways only: pages are appended, and a shared last page is replaced by a copy.
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
            self._send_new(fresh)

    def _send_new(self, seqs: list[Sequence]) -> None:
        """Rules, last id and position of sequences that are new in their slots."""
        state = np.array([[s.slot, s.rules.seed, s.ids[-1], len(s.ids) - 1] for s in seqs], dtype=np.int64)
        slots, seeds, tokens, places = upload(state.T, self.device)
        # A prefill step overwrites both when it samples; a fork of a running sequence is never prefilled.
        self.tokens.index_copy_(0, slots, tokens)
        self.place.index_copy_(0, slots, places.int())
        cuts = np.array([[r.temperature, r.top_p, r.min_p, r.top_k] for r in (s.rules for s in seqs)], dtype=np.float32)
        numbers = upload(cuts.T, self.device)
        self.rules.seeds.index_copy_(0, slots, seeds)
        self.rules.temperature.index_copy_(0, slots, numbers[0])
        self.rules.top_p.index_copy_(0, slots, numbers[1])
        self.rules.min_p.index_copy_(0, slots, numbers[2])
        self.rules.top_k.index_copy_(0, slots, numbers[3].int())


class DecodeBatch:
    """The rows of the decode batch with their tables; rebuilt only when rows join or leave (see `StepPlan.rows`)."""

    def __init__(self, slots: DeviceSlots, page_size: int, tiles: DecodeTiles) -> None:
        self.count, self.device, self.page_size, self.tiles = slots.count, slots.device, page_size, tiles
        self.rows: list[Sequence] = []
        self.bucket = 0
        """The padded batch size; rows behind the real ones use the dummy slot."""
        self.launches = 0
        """Tile sizes in the plan: 0: no plan, each row is read whole; 1: narrow tiles; 2: narrow and wide tiles."""
        self.cuts = self.masked = False
        """Whether any row cuts its distribution, or follows a grammar."""
        self.tops = 0
        """The largest `top_logprobs` of the rows."""
        self._left = 0
        """Steps for which the plan may still be used."""
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
        """Whether the rows are the same list as before and the plan may be used for one more step; call once a step."""
        self._left -= 1
        return rows is self.rows and self._left > 0

    def change(self, rows: list[Sequence]) -> None:
        """Take over other rows, or the same ones that have grown: send their slots and a new plan."""
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
            tables = (reads.narrow, self._narrow), (reads.wide, self._wide), (reads.parts, self._rows)
            for (table, target), room in zip(tables, rooms, strict=True):
                padded = np.zeros((room, table.shape[1]), dtype=np.int32)  # kernels skip pieces that end at 0
                padded[: len(table)] = table
                target[:room].copy_(upload(padded, self.device))
        self.rows, self._left = rows, PLAN_STEPS

    def plan(self, bucket: int, launches: int) -> DecodePlan:
        """The plan's tables for a step of `bucket` rows."""
        if not launches:
            return DecodePlan(self._alone[0][:bucket], None, self._alone[1], 0)
        narrow, wide, parts = self.tiles.rooms(bucket)
        return DecodePlan(self._narrow[:narrow], self._wide[:wide] if launches > 1 else None, self._rows, parts)

    @contextmanager
    def dummy_rows(self) -> Iterator[None]:
        """Inside, all rows use the dummy slot, so that capturing a step changes no sequence."""
        slots = self.slots.clone()
        self.slots.fill_(self.count)
        try:
            yield
        finally:
            self.slots.copy_(slots)
