"""Decides what the next step computes. `Engine` calls `plan` before each step and `commit` with its results.

Pure bookkeeping, no tensors. A step is either prefill (chunks of prompts, up to `chunk_tokens` ids in total) or decode
(one id for every running sequence). If there is work of both kinds, they alternate, so neither waits for more than one
step of the other. Sequences are admitted in order while there are free pages. If a running sequence finds no free page,
the one admitted last is preempted: it gives up its pages and is prefilled again later. Random draws are keyed by
position, so this does not change its text. Results may arrive one step late: `plan` never needs ids that the step in
progress is still sampling.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from upshot.engine.pages import ROOT, PagePool
from upshot.engine.sequence import DONE, RUNNING, WAITING, DecodeRows, Rules, Scored, Sequence

WHOLE = 4096
"""Prompts with at least this many ids left are prefilled in one step if `chunk_tokens` allows, because attention of a
prompt cut in two takes longer. A step may therefore take fewer or more ids than its budget."""


@dataclass(slots=True)
class Chunk:
    """Ids `start:stop` of a sequence to prefill, and the sequences that sample after the last one."""

    seq: Sequence
    start: int
    stop: int
    samplers: list[Sequence]

    @property
    def scored(self) -> range:
        """Positions of the given ids that this chunk scores: id p is scored by the logits of id p - 1."""
        return range(max(self.start + 1, self.seq.prompt_len), self.stop + 1) if self.seq.given else range(0)


@dataclass(slots=True)
class StepPlan:
    """One step: prefill if there are chunks, else decode. `rows` sample one id each, in this order."""

    rows: list[Sequence]
    """In decode: the same list object as in the last decode step if no sequence joined or left, which runners use to
    keep their tables."""
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages to copy (from, to) before the step; all sources are read before any target is written."""
    touched: list[Sequence] = field(default_factory=list)
    """In decode: all rows whose page lists may have changed since the last step."""


class Scheduler:
    """Owns the queue, the running sequences, their slots and pages."""

    def __init__(self, pool: PagePool, max_running: int, chunk_tokens: int, score_rows: int = 1 << 30) -> None:
        self.pool, self.max_running, self.chunk_tokens = pool, max_running, chunk_tokens
        self.score_rows = score_rows
        """Given ids scored in one step at most, since each needs a row of logits."""
        self._score_room = score_rows
        """How many of these are left in the step being planned."""
        self.holds: Callable[[], bool] = bool
        """Whether no waiting sequence may be admitted now (default: False)."""
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        """In the order of admission; siblings wait inside the first of them."""
        self.running: dict[Sequence, None] = {}
        """Prefilled sequences, in the order of their admission."""
        self.preempted = 0
        self._reading: list[Sequence] = []
        """Admitted sequences whose prefill is not complete."""
        self._slots = list(range(max_running - 1, -1, -1))
        self._copies: list[tuple[int, int]] = []
        self._just_read = False
        """Whether the last step was prefill."""
        self._rows = DecodeRows(pool.page_size)
        self._steady = False
        """Whether every running sequence can take part in every decode step (no grammars, no shortage of pages)."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.waiting or self.running or self._reading)

    @property
    def under_way(self) -> int:
        """Admitted sequences."""
        return len(self.running) + len(self._reading)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence (with its siblings)."""
        self.waiting[seq] = None

    def _add_first(self, seq: Sequence) -> None:
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)

    # --- planning

    def plan(self, chunk_tokens: int = 0) -> StepPlan | None:
        """The next step, or None if nothing can be computed until results are committed."""
        decode = self._just_read and bool(self.running)
        # Prefill first, unless the last step was prefill: it fills the decode batch, and a large batch makes a decode
        # step hardly slower.
        for read in (not decode, decode):
            plan = StepPlan([])
            if read:
                plan.chunks = self._read_prompts(chunk_tokens or self.chunk_tokens)
                plan.rows = [s for c in plan.chunks for s in c.samplers]
            else:
                plan.rows, plan.touched = self._extend_running()
            if plan.rows or plan.chunks:
                self._just_read = read
                plan.copies, self._copies = self._copies, []
                return plan
        return None

    def _read_prompts(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        self._score_room = self.score_rows
        for seq in list(self._reading):
            if budget <= 0:
                return chunks
            budget -= self._chunk(seq, budget, chunks)
        while self.waiting and budget > 0 and not self.holds():
            seq = next(iter(self.waiting))
            if len(self._slots) < 1 + len(seq.siblings) and len(self._slots) < self.max_running:
                break
            # Strictly in order: if shorter prompts overtook one that finds no room, it might wait for ever.
            if (seq.given and not self._score_room) or not self._admit(seq):
                break
            del self.waiting[seq]
            taken = self._chunk(seq, budget, chunks)
            if not taken:
                break
            budget -= taken
        return chunks

    def _admit(self, seq: Sequence) -> bool:
        """Give a waiting sequence a slot and pages for all its ids, cached ones first; False if there is no room."""
        if not self._slots or seq.pending:
            return False
        # The ids whose logits are needed are computed even if their keys and values are cached.
        cacheable = (seq.prompt_len if seq.given else len(seq.ids)) - 1
        pages, chain = self.pool.match(seq.packed(), cacheable)
        size = self.pool.page_size
        need = -(-len(seq.ids) // size) - len(pages)
        # One spare page per admitted sequence, so that running ones are not preempted at once.
        spare = self.under_way + len(seq.siblings) if self.under_way else 0
        if not self.pool.has(need + spare):
            self.pool.drop_all(pages)
            return False
        seq.pages, seq.chain, seq.published = pages, chain, len(pages)
        seq.computed = len(pages) * size
        self.pool.lookups += cacheable
        self.pool.hits += seq.computed
        if seq.given or len(seq.ids) == seq.prompt_len:
            seq.cached = seq.computed
        seq.pages += self.pool.take_some(need)
        seq.slot, seq.state = self._slots.pop(), RUNNING
        self._reading.append(seq)
        return True

    def _chunk(self, seq: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Append the sequence's next chunk to the step; returns its ids, 0 if it has to wait for the next step.

        Its pages are published already here: a later chunk of the same step may share them, because every layer stores
        the keys and values of all chunks before it attends.
        """
        to_read = len(seq.ids) - seq.given  # the last given id is scored, but predicts nothing
        start, left = seq.computed, to_read - seq.computed
        if left >= WHOLE and left > budget:
            if chunks and left <= self.chunk_tokens:
                return 0  # the next step takes it whole
            if not chunks:
                budget = min(left, self.chunk_tokens)
        stop = min(to_read, start + budget)
        if seq.given:
            first = max(start, seq.prompt_len - 1)
            stop = min(stop, first + self._score_room)
            self._score_room -= max(0, stop - first)
            if stop == start:
                return 0
        seq.computed = stop
        self._publish(seq, stop)
        samplers: list[Sequence] = []
        if stop == to_read:
            self._reading.remove(seq)
        if stop == to_read and seq.given:
            seq.pending = 1
            self.running[seq] = None  # until its log-probabilities arrive; it never decodes
        elif stop == to_read:
            samplers = [seq, *self._fork_siblings(seq)] if seq.siblings else [seq]
            for sampler in samplers:
                sampler.pending = 1
            self._run(samplers)
        chunks.append(Chunk(seq, start, stop, samplers))
        return stop - start

    def _fork_siblings(self, seq: Sequence) -> list[Sequence]:
        """The prompt of `seq` is prefilled: let its siblings share the pages. Returns those that got a slot."""
        siblings, slots = list(seq.siblings), len(self._slots)
        forked, rest = siblings[:slots], siblings[slots:]
        for twin in forked:
            self._share(seq, twin)
        for twin in reversed(rest):  # these find the prompt in the prefix cache later
            self._add_first(twin)
        seq.siblings.clear()
        return forked

    def _share(self, seq: Sequence, twin: Sequence) -> None:
        """Let `twin` run on the pages of `seq`; the first of them to write into the last page copies it."""
        self.pool.hold_all(seq.pages)
        twin.pages = list(seq.pages)
        twin.published, twin.chain = seq.published, seq.chain
        twin.cached = seq.computed
        twin.slot, twin.state = self._slots.pop(), RUNNING

    def _run(self, seqs: Iterable[Sequence]) -> None:
        """Their prompts are prefilled: from now on they decode."""
        for seq in seqs:
            self.running[seq] = None
            self._rows.join(seq)
            self._steady &= seq.grammar is None

    def _extend_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """The rows of a decode step, and those of them whose pages may have changed."""
        touched = self._rows.begin_step()
        # In most steps no sequence joins, leaves or needs a page. The host then checks only the few rows that are due
        # instead of a thousand.
        if self._steady and self.pool.has(len(touched)):
            for seq in touched:
                if seq.length >= seq.max_length:
                    self._rows.leave(seq)  # its last id is being sampled
                else:
                    self._own_page(seq, [])
                    self._rows.schedule_check(seq)
            rows = self._rows.current()
        else:
            rows = touched = self._check_all()
        for seq in rows:
            seq.pending += 1
        return rows, touched

    def _check_all(self) -> list[Sequence]:
        """The rows of a decode step when pages are short or some sequences cannot take part."""
        rows: list[Sequence] = []
        self._steady = not any(seq.grammar is not None for seq in self.running)
        for seq in list(self.running):
            if seq.state != RUNNING or seq.length >= seq.max_length:
                continue  # preempted by a row before it, scored only, or its last id is being sampled
            if seq.grammar is not None and seq.pending:
                continue  # its grammar must see the id being sampled first
            if self._own_page(seq, rows):
                rows.append(seq)
            elif seq.pending:
                self._steady = False
                break  # no sequence can be preempted before results are committed
        self._rows.reset(rows, self.running)
        return rows

    def _own_page(self, seq: Sequence, rows: list[Sequence]) -> bool:
        """Make sure that the page of the sequence's next id exists and is not shared; False if there is no page.

        `rows`: sequences that already have a page for this step.
        """
        index = (seq.length - 1) // self.pool.page_size
        if index < len(seq.pages) and self.pool.alone(seq.pages[index]):
            return True
        while not self.pool.has(1):
            # Preempt the sequence admitted last, so that the first ones finish and there is always progress. But never
            # one whose next id is being sampled (the id would be lost), or that already has a page for this step.
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
        elif not self.pool.alone(seq.pages[index]):  # otherwise the sequence that shared it has just been preempted
            page = self.pool.take()
            self._copies.append((seq.pages[index], page))
            self.pool.drop(seq.pages[index])
            seq.pages[index] = page
        return True

    # --- results

    def commit(self, rows: Iterable[Sequence], ids: Iterable[int], logprobs: Iterable[float], version: int) -> None:
        """Append one sampled id to each row; results of sequences that ended meanwhile are dropped."""
        for seq, token, logprob in zip(rows, ids, logprobs, strict=True):
            if seq.state != RUNNING:
                seq.pending = 0
                continue
            seq.pending -= 1
            known = seq.ids
            known.append(token)
            seq.logprobs.append(logprob)
            if len(known) >= seq.check or token in seq.rules.stop_ids:
                self._after_id(seq, token, logprob, version)

    def commit_scores(self, scored: Iterable[Scored], version: int) -> None:
        """Append log-probabilities of given ids; a sequence is done when all of its given ids are scored."""
        for seq, logprobs, tops in scored:
            if seq.state != RUNNING:
                seq.pending = 0
                continue
            seq.version = version
            seq.logprobs += logprobs
            seq.tops += tops
            if len(seq.logprobs) == len(seq.ids) - seq.prompt_len:
                seq.pending = 0
                self.finish(seq, "length")

    def _after_id(self, seq: Sequence, token: int, logprob: float, version: int) -> None:
        """After an id was appended: publish a full page, call back, advance the grammar, check for the end.

        `seq.check` is the length at which this is needed next: every id with callbacks, else the next full page.
        """
        if seq.version < 0:
            seq.version = version
        size, length = self.pool.page_size, len(seq.ids)
        if (length - 1) % size == 0:
            self._publish(seq, length - 1)
        rules = seq.rules
        try:
            if seq.error is not None:  # its grammar failed before this id was sampled
                raise seq.error
            if seq.on_token is not None:
                seq.on_token(seq, token, logprob)
            ended = token in rules.stop_ids or (seq.grammar is not None and seq.grammar.accept(token))
            ended = ended or (rules.stopped is not None and rules.stopped(seq.sampled))
        except Exception as error:  # from this request's callback, stop check or grammar: only this request fails
            self.fail(seq, error)
            return
        if seq.on_token is None and seq.grammar is None and rules.stopped is None:
            seq.check = min(length + size - (length - 1) % size, seq.max_length)
        if ended:
            self.finish(seq, "stop")
        elif length >= seq.max_length:
            self.finish(seq, "length")

    def _publish(self, seq: Sequence, known: int) -> None:
        """Enter the pages that the first `known` ids fill into the prefix cache."""
        size = self.pool.page_size
        first, last = seq.published, known // size
        if last > first:
            seq.chain = self.pool.publish(seq.chain, seq.packed()[first * size : last * size], seq.pages[first:last])
            seq.published = last

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence in any state and release its slot and pages."""
        if seq.state == DONE:
            return
        if seq.state == RUNNING:
            self._stop(seq)
            for twin in reversed(seq.siblings):  # there are none once the prompt is prefilled
                self._add_first(twin)
            seq.siblings.clear()
        elif seq not in self.waiting:  # it waits inside the first of its siblings
            del seq.siblings[seq]
        else:
            if seq.siblings:  # the next of them takes their place in the queue
                heir = next(iter(seq.siblings))
                del heir.siblings[heir]
                self._add_first(heir)
            del self.waiting[seq]
        seq.state, seq.finish = DONE, reason
        if seq.on_done is not None:
            try:
                seq.on_done(seq)
            except Exception as error:  # must not stop other requests
                warnings.warn(f"on_done of a request failed: {type(error).__name__}: {error}", stacklevel=2)

    def fail(self, seq: Sequence, error: BaseException) -> None:
        """End a sequence with an error."""
        seq.error = error
        self.finish(seq, "error")

    def _stop(self, seq: Sequence) -> None:
        """Take an admitted sequence out of its step list and release its slot and pages."""
        if seq in self.running:
            del self.running[seq]
            self._rows.leave(seq)
            if not self.running:
                self._rows.reset([], ())
        else:
            self._reading.remove(seq)
        self.pool.remember(seq.packed(), seq.pages[: seq.published])
        self.pool.give_back(seq.pages)
        self._slots.append(seq.slot)
        seq.pages, seq.slot = [], -1
        seq.computed, seq.published, seq.chain = 0, 0, ROOT

    def preempt(self, seq: Sequence) -> None:
        """Release a sequence's pages and put it at the front of the queue, to be prefilled again from its ids."""
        self._stop(seq)
        if seq.given:  # scored again from the first given id, so that one version of the weights scores all
            seq.logprobs.clear()
            seq.tops.clear()
        seq.state = WAITING
        self._add_first(seq)
        self.preempted += 1

    def restart(self) -> None:
        """Put all admitted sequences back into the queue in their order; no results may be pending."""
        for seq in reversed([*self.running, *self._reading]):  # each goes to the front of the queue
            self.preempt(seq)
            self.preempted -= 1
        self._copies.clear()

    def fork(self, seq: Sequence, rules: Rules) -> Sequence:
        """A new sequence that continues from the ids and the grammar state of `seq`; no results may be pending."""
        grammar = None if seq.grammar is None else seq.grammar.copy()
        twin = Sequence(list(seq.ids), rules, prompt_len=len(seq.ids), grammar=grammar)
        if seq.state == RUNNING and seq in self.running and self._slots:
            self._share(seq, twin)
            twin.cached = len(seq.ids) - 1
            self._run([twin])
            self._rows.check_next(seq)
        else:
            self.add(twin)
        return twin

    def all(self) -> Seq[Sequence]:
        """All queued and running sequences."""
        twins = [t for s in [*self.waiting, *self._reading] for t in s.siblings]
        return [*self.waiting, *self._reading, *self.running, *twins]
