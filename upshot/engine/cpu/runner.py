"""Runs the engine's steps on a CPU in plain PyTorch. `Engine` calls `TorchRunner.run` for each step.

Keys and values are stored in pages. While sequences decode, a dense copy of them stays in a window (both in store.py),
so that a decode step is one batched attention call that copies nothing but the new tokens. `PrefillStep` and
`DecodeStep` are the attention of one step, which llama/select.py also uses to check drivers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upshot.engine.cpu.store import Store, Window, attend_with_prefixes, attention
from upshot.engine.exact.blocks import pick_logprobs
from upshot.engine.exact.mode import ExactMode
from upshot.engine.exact.step import ExactStep
from upshot.engine.kernels.plain import AttentionOptions
from upshot.engine.llama.driver import Driver
from upshot.engine.llama.shape import causal_lm
from upshot.engine.sampling import RowRules, apply_grammars, by_sequence, given_logprobs, sample, score_request
from upshot.engine.scheduler import Chunk, StepPlan
from upshot.engine.sequence import Scored, Sequence, Top, likeliest


class DecodeStep:
    """The attention of a decode step: one new token per row, in the window or gathered from pages (`window` None)."""

    def __init__(self, store: Store, window: Window | None, rows: list[Sequence], positions: np.ndarray) -> None:
        self.store, self.window = store, window
        self.n = len(rows)
        size = store.page_size
        places = zip(rows, positions.tolist(), strict=True)
        pages = np.fromiter([seq.pages[place // size] for seq, place in places], np.int64)
        self.cells = torch.from_numpy(pages * size + positions % size)
        self.positions = torch.from_numpy(positions)
        self.row_index = torch.arange(self.n)
        self.table: Tensor | None = None
        if window is None:
            places_in_row = positions
            self.table = store.table([(s, 0, p + 1) for s, p in zip(rows, positions.tolist(), strict=True)])
        else:
            places_in_row = positions - window.starts
        self.own = torch.from_numpy(places_in_row)
        self.length = int(places_in_row.max()) + 1
        # If all rows have the same length, none needs a mask.
        self._masks: dict[int, Tensor | None] = {0: None} if int(places_in_row.min()) + 1 == self.length else {}
        """By sliding window: the mask [rows, 1, 1, length] of positions that each row sees; None: all."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Store and attend; see `AttentionStep`."""
        self.store.write(layer, self.cells, k, v)
        if self.window is not None:
            keys, values = self.window.k[layer], self.window.v[layer]
            keys[self.row_index, :, self.own] = k
            values[self.row_index, :, self.own] = v
            keys, values = keys[: self.n, :, : self.length], values[: self.n, :, : self.length]
        else:
            keys, values = (x[layer][self.table].transpose(1, 2) for x in (self.store.k, self.store.v))
        heads, kv_heads = q.shape[1], k.shape[1]
        # Query heads that share a key head become its queries, so no key is repeated.
        grouped = q.reshape(self.n, kv_heads, heads // kv_heads, -1)
        if options.window not in self._masks:
            back = self.own[:, None] - torch.arange(self.length)
            seen = (back >= 0) & (back < options.window) if options.window else back >= 0
            self._masks[options.window] = None if bool(seen.all()) else seen[:, None, None, :]
        mask = self._masks[options.window]
        if self.window is not None and self.window.stacks:
            stacks = self.window.stacks
            return attend_with_prefixes(layer, grouped, keys, values, mask, stacks, options.scale).reshape(q.shape)
        return attention(grouped, keys, values, mask, options).reshape(q.shape)


@dataclass(slots=True)
class Group:
    """Chunks of similar length, whose attention is one padded call."""

    rows: Tensor
    """[chunks, longest] Index of each query in the packed tokens; padding repeats the chunk's first token."""
    real: Tensor
    """[chunks, longest] False where a query is padding."""
    table: Tensor | None
    """[chunks, longest context] Cells of keys; None if all chunks start at 0 and can use the packed keys."""
    mask_parts: tuple[Tensor, Tensor] | None
    """With a table: positions of the queries [chunks, longest] and of the keys [longest context]."""


def group_chunks(chunks: list[Chunk]) -> list[list[tuple[int, Chunk]]]:
    """Chunks with their offsets among the packed tokens, in groups with little padding and bounded masks."""
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    items = list(zip(accumulate(sizes, initial=0), chunks, strict=False))
    items.sort(key=lambda x: (x[1].start > 0, x[1].stop - x[1].start, x[1].stop))
    groups: list[list[tuple[int, Chunk]]] = []
    for offset, chunk in items:
        n = chunk.stop - chunk.start
        if groups:
            first = groups[-1][0][1]
            size = first.stop - first.start
            alike = (first.start > 0) == (chunk.start > 0) and n <= size * 1.25 + 4
            if alike and chunk.stop <= 2 * first.stop + 32 and len(groups[-1]) * n * chunk.stop < 1 << 24:
                groups[-1].append((offset, chunk))
                continue
        groups.append([(offset, chunk)])
    return groups


class PrefillStep:
    """The attention of a prefill step over packed chunks."""

    def __init__(self, store: Store, chunks: list[Chunk]) -> None:
        self.store = store
        self.cells = torch.from_numpy(np.concatenate([store.cells(c.seq, c.start, c.stop) for c in chunks]))
        self.positions = torch.from_numpy(np.concatenate([np.arange(c.start, c.stop) for c in chunks]))
        self.groups: list[Group] = []
        for items in group_chunks(chunks):
            offsets, starts, stops = np.array([(offset, chunk.start, chunk.stop) for offset, chunk in items]).T
            sizes = stops - starts
            steps = np.arange(sizes.max())
            real = steps < sizes[:, None]
            steps_or_first = np.where(real, steps, 0)
            group = Group(torch.from_numpy(offsets[:, None] + steps_or_first), torch.from_numpy(real), None, None)
            if starts.any():
                group.table = store.table([(chunk.seq, 0, chunk.stop) for _, chunk in items])
                queries = torch.from_numpy(starts[:, None] + steps_or_first)
                group.mask_parts = queries, torch.arange(group.table.shape[1])
            self.groups.append(group)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Store and attend; see `AttentionStep`."""
        self.store.write(layer, self.cells, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        per_key = q.shape[1] // k.shape[1]
        window = options.window
        for group in self.groups:
            queries = q[group.rows].transpose(1, 2)
            if group.table is None:
                keys, values = k[group.rows].transpose(1, 2), v[group.rows].transpose(1, 2)
                steps = torch.arange(group.rows.shape[1])
                back = steps[:, None] - steps
            else:
                keys, values = (x[layer][group.table].transpose(1, 2) for x in (self.store.k, self.store.v))
                assert group.mask_parts is not None
                back = (group.mask_parts[0][:, :, None] - group.mask_parts[1])[:, None]
            if per_key > 1:
                keys, values = keys.repeat_interleave(per_key, 1), values.repeat_interleave(per_key, 1)
            if group.table is None and not window:
                result = attention(queries, keys, values, None, options, causal=True)
            else:
                seen = (back >= 0) & (back < window) if window else back >= 0
                result = attention(queries, keys, values, seen, options)
            out[group.rows[group.real]] = result.transpose(1, 2)[group.real]
        return out


class TorchRunner:
    """Executes step plans on the CPU."""

    def __init__(self, driver: Driver, store: Store, window_bytes: int, exact: bool = False) -> None:
        self.driver, self.store = driver, store
        self.exact = ExactMode(kernels=False) if exact else None
        # `attend_with_prefixes` knows no sliding windows, soft caps or sinks: rows of such models share pages, but each
        # row reads them itself.
        config = causal_lm(driver.lm).config.get_text_config()
        odd = getattr(config, "sliding_window", None) or getattr(config, "attn_logit_softcapping", None)
        odd = odd or any(hasattr(module, "sinks") for module in driver.lm.modules())
        self._new_window = partial(Window, self.store, window_bytes, share=not odd)
        self.window = self._new_window()
        self._rules: tuple[list[Sequence], RowRules] | None = None

    def forget(self) -> None:
        """The weights changed: empty the window and merge adapters again."""
        self.window.clear()
        self.driver.refresh()

    def park(self, keep_steps: bool = False) -> None:
        """Release the memory (see `Engine.park`)."""
        self.store.release()
        self.window = self._new_window()
        if not keep_steps:
            self.driver.release()

    def resume(self) -> None:
        """Allocate again what `park` released."""
        self.store.take()
        self.driver.take()

    def run(self, plan: StepPlan) -> tuple[list[Sequence], list[int], list[float], list[Top] | None, list[Scored]]:
        """Compute a step; returns rows, sampled ids, log-probabilities, likeliest ids, and what was scored."""
        with torch.inference_mode():
            if plan.copies:
                self.store.copy_pages(plan.copies)
            scored: list[Scored] = []
            if plan.chunks:
                rows, logits, positions, scored = self._prefill(plan.chunks)
            else:
                rows, logits, positions = self._decode(plan.rows)
            if not rows:
                return [], [], [], None, scored
            return *self._sample(rows, logits, positions), scored

    def _prefill(self, chunks: list[Chunk]) -> tuple[list[Sequence], Tensor, np.ndarray, list[Scored]]:
        spans = [(c.seq, c.start, c.stop) for c in chunks]
        step: Any = PrefillStep(self.store, chunks) if self.exact is None else ExactStep(self.store, spans)
        ids = torch.tensor([t for c in chunks for t in c.seq.ids[c.start : c.stop]])
        ends = np.cumsum([c.stop - c.start for c in chunks]) - 1
        last = [int(end) for end, c in zip(ends, chunks, strict=True) for _ in c.samplers]
        rows = [s for c in chunks for s in c.samplers]
        wanted = score_request(chunks)
        places = [*last, *wanted.places] if wanted else last
        logits = self.driver.logits(ids, step.positions, step, torch.tensor(places, dtype=torch.int64))
        logits, of_given = logits[: len(last)], logits[len(last) :]
        scored = by_sequence(wanted, given_logprobs(of_given, torch.tensor(wanted.ids), wanted.tops)) if wanted else []
        return rows, logits, np.array([len(s.ids) for s in rows]), scored

    def _decode(self, wanted: list[Sequence]) -> tuple[list[Sequence], Tensor, np.ndarray]:
        if self.exact is not None:
            exact = ExactStep(self.store, [(s, len(s.ids) - 1, len(s.ids)) for s in wanted])
            logits = self.driver.logits(torch.tensor([s.ids[-1] for s in wanted]), exact.positions, exact, None)
            return wanted, logits, exact.positions.numpy() + 1
        dense = self.window.admit(wanted)
        rows = [row.seq for row in self.window.rows] if dense else wanted
        positions = np.fromiter([len(s.ids) - 1 for s in rows], np.int64)
        step = DecodeStep(self.store, self.window if dense else None, rows, positions)
        ids = torch.tensor([s.ids[-1] for s in rows])
        return rows, self.driver.logits(ids, step.positions, step, step.row_index), positions + 1

    def _sample(self, rows: list[Sequence], logits: Tensor, positions: np.ndarray) -> Any:
        logits = logits.float()
        if any(seq.grammar is not None for seq in rows):
            apply_grammars(logits, rows)
        if self._rules is None or self._rules[0] != rows:
            self._rules = (rows, RowRules([s.rules for s in rows]))
        rules = self._rules[1]
        if self.exact is None:
            ids, logprobs, everything = sample(logits, rules, positions)
        else:
            with self.exact:
                ids, _, everything = sample(logits, rules, positions)
            logprobs = pick_logprobs(logits, ids, torch.from_numpy(rules.temperature))
        tops: list[Top] | None = None
        if rules.tops:
            values, order = everything.topk(min(rules.tops, everything.shape[-1]), dim=-1)
            likely = zip(rows, order.tolist(), values.tolist(), strict=True)
            tops = [likeliest(o, v, s.rules.top_logprobs) for s, o, v in likely]
        return rows, ids.tolist(), logprobs.tolist(), tops
