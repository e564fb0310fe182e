"""Which sequences compute what in the next step. Pure bookkeeping, no tensors.

A step either reads prompts (chunks of up to `chunk_tokens` ids in all) or extends every running sequence by one id.
Sequences are admitted in order while pages last; when a running sequence finds no page, the one admitted last gives its
pages back and is computed again later from its ids (its randomness is keyed by position, so it goes on unchanged).
Results may come back one step late: `plan` never needs the ids of the step under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from upshot.engine.pages import ROOT, PagePool
from upshot.engine.sequence import DONE, RUNNING, WAITING, Rules, Sequence


@dataclass(slots=True)
class Chunk:
    """Ids `start:stop` of a sequence to be read, and the sequences that sample from the last one."""

    seq: Sequence
    start: int
    stop: int
    samplers: list[Sequence]


@dataclass(slots=True)
class Plan:
    """One step: either chunks of prompts or running sequences; `rows` sample one id each, in this order."""

    rows: list[Sequence]
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages to copy (from, to) before the step."""


class Scheduler:
    """Owns the queue, the running sequences, their slots and pages."""

    def __init__(self, pool: PagePool, max_running: int, chunk_tokens: int, max_streak: int = 64) -> None:
        self.pool = pool
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.max_streak = max_streak
        """Prompt-reading steps in a row before running sequences get a step."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preempted = 0
        self._reading: list[Sequence] = []
        """Admitted, prompt not wholly read yet."""
        self._slots = list(range(max_running - 1, -1, -1))
        self._copies: list[tuple[int, int]] = []
        self._streak = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.waiting or self.running or self._reading)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence (with its siblings)."""
        self.waiting.append(seq)

    def most_pages(self, seq: Sequence) -> int:
        """Pages the sequence would need on its own at its full length."""
        return -(-seq.max_length // self.pool.page_size)

    # --- planning

    def plan(self, chunk_tokens: int = 0) -> Plan | None:
        """The next step, or None if nothing can be computed until results are committed."""
        if self._streak < self.max_streak or not self.running:
            chunks = self._read_prompts(chunk_tokens or self.chunk_tokens)
            if chunks:
                self._streak += 1
                return Plan([s for c in chunks for s in c.samplers], chunks, self._take_copies())
        self._streak = 0
        rows = self._extend_running()
        return Plan(rows, [], self._take_copies()) if rows else None

    def _take_copies(self) -> list[tuple[int, int]]:
        copies, self._copies = self._copies, []
        return copies

    def _read_prompts(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for seq in list(self._reading):
            if budget <= 0:
                return chunks
            budget -= self._chunk(seq, budget, chunks)
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            if len(self._slots) < 1 + len(seq.siblings) and len(self._slots) < self.max_running:
                break
            if not self._admit(seq):
                break
            self.waiting.popleft()
            budget -= self._chunk(seq, budget, chunks)
        return chunks

    def _admit(self, seq: Sequence) -> bool:
        if not self._slots or seq.pending:
            return False
        pages, chain = self.pool.match(seq.ids, len(seq.ids) - 1)
        size = self.pool.page_size
        need = -(-len(seq.ids) // size) - len(pages)
        under_way = len(self.running) + len(self._reading)
        # One spare page for each sequence keeps admission from starving those that are under way.
        spare = under_way + len(seq.siblings) if under_way else 0
        if self.pool.available < need + spare:
            self.pool.drop_all(pages)
            return False
        seq.pages, seq.chain, seq.published = pages, chain, len(pages)
        seq.computed = len(pages) * size
        if not seq.sampled:
            seq.cached = seq.computed
        while len(seq.pages) * size < len(seq.ids):
            seq.pages.append(self.pool.take())
        seq.slot, seq.state = self._slots.pop(), RUNNING
        self._reading.append(seq)
        return True

    def _chunk(self, seq: Sequence, budget: int, chunks: list[Chunk]) -> int:
        start = seq.computed
        stop = min(len(seq.ids), start + budget)
        seq.computed = stop
        self._publish(seq)
        samplers: list[Sequence] = []
        if stop == len(seq.ids):
            self._reading.remove(seq)
            samplers = [seq, *self._fork_siblings(seq)]
            for sampler in samplers:
                sampler.pending = 1
            self.running.extend(samplers)
        chunks.append(Chunk(seq, start, stop, samplers))
        return stop - start

    def _fork_siblings(self, seq: Sequence) -> list[Sequence]:
        forked: list[Sequence] = []
        for twin in seq.siblings:
            if not self._slots:
                # No slot left: the rest reads the prompt from the prefix cache later.
                self.waiting.appendleft(twin)
                continue
            self._share(seq, twin)
            forked.append(twin)
        seq.siblings = []
        return forked

    def _share(self, seq: Sequence, twin: Sequence) -> None:
        for page in seq.pages:
            self.pool.hold(page)
        twin.pages = list(seq.pages)
        twin.computed, twin.published, twin.chain = seq.computed, seq.published, seq.chain
        twin.cached = twin.computed
        twin.slot, twin.state = self._slots.pop(), RUNNING

    def _extend_running(self) -> list[Sequence]:
        rows: list[Sequence] = []
        size = self.pool.page_size
        for seq in list(self.running):
            if seq.state != RUNNING or seq.length >= seq.max_length:
                continue  # preempted just now, or its last id is under way
            if seq.grammar is not None and seq.pending:
                continue  # its next id depends on the one under way
            position = seq.length - 1
            page_needed = position % size == 0 or self.pool.refs(seq.pages[-1]) > 1
            if page_needed and not self._own_page(seq, position // size, rows):
                if seq.pending:
                    return rows  # results must come back first
                continue
            seq.computed = position + 1
            rows.append(seq)
        for seq in rows:
            seq.pending += 1
        return rows

    def _own_page(self, seq: Sequence, index: int, rows: list[Sequence]) -> bool:
        """Make page `index` of the sequence exist and be its own; False if the sequence itself was preempted."""
        while self.pool.available == 0:
            victim = next((s for s in reversed(self.running) if not s.pending), None)
            if victim is None or (victim in rows):
                victim = seq
            if victim is seq and seq.pending:
                return False
            self.preempt(victim)
            if victim is seq:
                return False
        if index == len(seq.pages):
            seq.pages.append(self.pool.take())
        elif self.pool.refs(seq.pages[index]) > 1:
            page = self.pool.take()
            self._copies.append((seq.pages[index], page))
            self.pool.drop(seq.pages[index])
            seq.pages[index] = page
        return True

    # --- results

    def commit(self, seq: Sequence, token: int, logprob: float, version: int) -> None:
        """Take one sampled id."""
        if seq.state != RUNNING:
            seq.pending = 0
            return
        seq.pending -= 1
        seq.ids.append(token)
        seq.logprobs.append(logprob)
        if seq.version < 0:
            seq.version = version
        if (len(seq.ids) - 1) % self.pool.page_size == 0:
            self._publish(seq)
        rules = seq.rules
        if seq.on_token is not None:
            seq.on_token(seq, token, logprob)
        ended = token in rules.stop_ids or (seq.grammar is not None and seq.grammar.accept(token))
        if ended or (rules.stopped is not None and rules.stopped(seq.sampled)):
            self.finish(seq, "stop")
        elif len(seq.ids) >= seq.max_length:
            self.finish(seq, "length")

    def _publish(self, seq: Sequence) -> None:
        size = self.pool.page_size
        known = min(seq.computed, len(seq.ids))
        while (seq.published + 1) * size <= known:
            start = seq.published * size
            page = seq.pages[seq.published]
            seq.chain = self.pool.publish(seq.chain, tuple(seq.ids[start : start + size]), page)
            seq.published += 1

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence in any state and give back what it holds."""
        if seq.state == DONE:
            return
        if seq.state == RUNNING:
            if seq in self._reading:
                self._reading.remove(seq)
                for twin in reversed(seq.siblings):
                    self.waiting.appendleft(twin)
                seq.siblings = []
            else:
                self.running.remove(seq)
            self._release(seq)
        else:
            self._leave_queue(seq)
        seq.state, seq.finish = DONE, reason
        if seq.on_done is not None:
            seq.on_done(seq)

    def _leave_queue(self, seq: Sequence) -> None:
        for leader in [*self.waiting, *self._reading]:
            if seq in leader.siblings:
                leader.siblings.remove(seq)
                return
        self.waiting.remove(seq)
        if seq.siblings:
            heir, *rest = seq.siblings
            heir.siblings, seq.siblings = rest, []
            self.waiting.appendleft(heir)

    def _release(self, seq: Sequence) -> None:
        self.pool.drop_all(seq.pages)
        self._slots.append(seq.slot)
        seq.pages, seq.slot = [], -1
        seq.computed, seq.published, seq.chain = 0, 0, ROOT

    def preempt(self, seq: Sequence) -> None:
        """Take a sequence's pages away; it is computed again from its ids, before all that wait."""
        (self._reading if seq in self._reading else self.running).remove(seq)
        self._release(seq)
        seq.state = WAITING
        self.waiting.appendleft(seq)
        self.preempted += 1

    def restart(self) -> None:
        """Put everything that is under way back into the queue, in its order (no results may be pending)."""
        for seq in reversed([*self.running, *self._reading]):
            self.preempt(seq)
            self.preempted -= 1
        self._copies.clear()

    def fork(self, seq: Sequence, rules: Rules) -> Sequence:
        """A new sequence that goes on from all ids of `seq` (no results may be pending)."""
        twin = Sequence(list(seq.ids), rules, prompt_len=len(seq.ids))
        if seq.state == RUNNING and seq in self.running and self._slots:
            self._share(seq, twin)
            self.running.append(twin)
        else:
            self.add(twin)
        return twin

    def all(self) -> Seq[Sequence]:
        """Everything queued or under way."""
        twins = [t for s in [*self.waiting, *self._reading] for t in s.siblings]
        return [*self.waiting, *self._reading, *self.running, *twins]
