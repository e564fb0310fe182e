"""Pages of the KV cache: who holds which, which hold a known prefix, which can be taken.

Pure bookkeeping, no tensors. A page is a number. Page 0 is never assigned: kernels may write values there that are not
read. A published page is found by the exact tokens it holds and by the chain of pages before it, so prefixes are shared
without hash collisions. A page without holders stays findable until its space is needed.

Looking up every page of a long prompt at every turn of a conversation would cost turns × tokens. So the pool remembers
the *trail* of a long sequence, its ids and pages: a prompt that begins alike follows it in one comparison.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np

ROOT = 0
"""The chain of the empty prefix."""
WIDTH = array("i").itemsize
STRIDE = 64
"""Pages between the places from which a trail can be followed."""
TRAILS = 4096
"""Most such places."""


def packed_ids(ids: Sequence[int]) -> array[int]:
    """Ids as machine integers: half the price to compare and to hash."""
    return ids if isinstance(ids, array) else array("i", ids)


class PagePool:
    """Reference-counted pages with a cache of published prefixes."""

    def __init__(self, n_pages: int, page_size: int) -> None:
        if n_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (page 0 is reserved), got {n_pages}")
        self.page_size, self.n_pages = page_size, n_pages
        self._free = list(range(n_pages - 1, 0, -1))
        self._refs = [0] * n_pages
        self._refs[0] = 1
        self._found: dict[tuple[int, bytes], tuple[int, int]] = {}
        """(chain before, packed ids) → (page, chain after)."""
        self._key: list[tuple[int, bytes] | None] = [None] * n_pages
        """Under what each page is published."""
        self._chains = np.zeros(n_pages, dtype=np.int64)
        """The chain after each published page."""
        self._trails: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        """Where a chain led a long sequence: its ids, its pages, the chain after each."""
        self._idle: deque[int] = deque()
        """Published pages that had no holder at some time, oldest first; only the last entry of a page counts."""
        self._entries = [0] * n_pages
        """How often each page is in that queue."""
        self._n_idle = 0
        self._returned: list[Sequence[int]] = []
        """Pages of holders that are done with them, still counted as held."""
        self._next_chain = ROOT + 1
        self.hits = 0
        self.lookups = 0

    @property
    def available(self) -> int:
        """Pages that could be taken now."""
        self.settle()
        return len(self._free) + self._n_idle

    def has(self, count: int) -> bool:
        """Whether this many pages could be taken now."""
        return len(self._free) + self._n_idle >= count or self.available >= count

    @property
    def held(self) -> int:
        """Pages with a holder (page 0 not counted)."""
        return self.n_pages - 1 - self.available

    @property
    def cached(self) -> int:
        """Pages that hold a findable prefix."""
        return len(self._found)

    def refs(self, page: int) -> int:
        """How many hold the page."""
        self.settle()
        return self._refs[page]

    def alone(self, page: int) -> bool:
        """Whether one holds the page."""
        return self._refs[page] == 1 or self.refs(page) == 1

    def take(self) -> int:
        """A page for one holder; the oldest idle prefix makes room if no page is free."""
        if not self._free and not self.has(1):
            raise MemoryError("no page is free; check `available` before taking one")
        page = self._free.pop() if self._free else self._oldest_idle()
        self._refs[page] = 1
        return page

    def _oldest_idle(self) -> int:
        """The page that has been without a holder for the longest time; it is no longer findable."""
        while True:
            page = self._idle.popleft()
            self._entries[page] -= 1
            key = self._key[page]
            if self._entries[page] == 0 and self._refs[page] == 0 and key is not None:
                self._n_idle -= 1
                self._key[page] = None
                self._chains[page] = ROOT
                del self._found[key]
                return page

    def take_some(self, count: int) -> list[int]:
        """`count` pages for one holder."""
        free = self._free
        if count > len(free) or not count:
            return [self.take() for _ in range(count)]
        pages = free[: -count - 1 : -1]
        del free[-count:]
        for page in pages:
            self._refs[page] = 1
        return pages

    def hold_all(self, pages: Sequence[int]) -> None:
        """One more holder of each page."""
        refs = self._refs
        for page in pages:
            if refs[page] == 0:
                self._n_idle -= 1
            refs[page] += 1

    def drop(self, page: int) -> None:
        """One holder less; the last one frees it, or leaves it findable if it was published."""
        self.drop_all((page,))

    def drop_all(self, pages: Sequence[int]) -> None:
        """Drop a sequence's pages, the last first, so that the ends of prefixes are reused before their beginnings."""
        counts, key = self._refs, self._key
        for page in reversed(pages):
            count = counts[page] - 1
            if count < 0:
                raise RuntimeError(f"page {page} was dropped more often than held")
            counts[page] = count
            if count:
                continue
            if key[page] is None:
                self._free.append(page)
            else:
                self._idle.append(page)
                self._entries[page] += 1
                self._n_idle += 1
        if len(self._idle) > 2 * self.n_pages:
            self._tidy()

    def give_back(self, pages: Sequence[int]) -> None:
        """Drop a sequence's pages later: when there is time, or when pages are needed."""
        self._returned.append(pages)

    def settle(self, most: int = 0) -> None:
        """Drop the pages that were given back, of at most this many sequences (0: of all)."""
        if self._returned:
            count = most or len(self._returned)
            for pages in self._returned[:count]:
                self.drop_all(pages)
            del self._returned[:count]

    def _tidy(self) -> None:
        """Forget entries that do not count, so that the queue stays short."""
        entries, queue = self._entries, self._idle
        for _ in range(len(queue)):
            page = queue.popleft()
            if entries[page] == 1 and self._refs[page] == 0:
                queue.append(page)
            else:
                entries[page] -= 1

    def match(self, ids: Sequence[int], limit: int) -> tuple[list[int], int]:
        """Pages (now held) that hold the longest published prefix of `ids[:limit]`, and the chain after them."""
        packed = packed_ids(ids).tobytes()
        size = self.page_size * WIDTH
        pages: list[int] = []
        chain = ROOT
        while len(pages) < limit // self.page_size:
            start = len(pages) * size
            hit = self._found.get((chain, packed[start : start + size]))
            if hit is None:
                break
            page, chain = hit
            pages.append(page)
            if chain in self._trails:
                chain = self._follow(chain, np.frombuffer(packed, np.int32, limit), pages)
        self.hold_all(pages)
        self.lookups += limit
        self.hits += len(pages) * self.page_size
        return pages, chain

    def _follow(self, chain: int, ids: np.ndarray, pages: list[int]) -> int:
        """Add the pages that these ids share with a trail which they have followed so far; the chain after them."""
        known, trail, chains = self._trails[chain]
        start, size = len(pages), self.page_size
        stop = min(len(ids) // size, len(trail))
        same = (ids[start * size : stop * size] == known[start * size : stop * size]).reshape(-1, size).all(1)
        # Else a page holds other ids by now, or was never findable: an equal one had been published before it.
        same &= (chains[start:stop] != ROOT) & (self._chains[trail[start:stop]] == chains[start:stop])
        stop = stop if same.all() else start + int(same.argmin())
        pages += trail[start:stop].tolist()
        return int(chains[stop - 1])

    def remember(self, ids: Sequence[int], pages: Sequence[int]) -> None:
        """Keep the trail of a sequence whose first `pages` were published, if it is long."""
        if len(pages) > STRIDE:
            trail = np.array(pages)
            kept = np.array(packed_ids(ids)), trail, self._chains[trail]
            for chain in kept[2][::STRIDE].tolist():
                self._trails.pop(chain, None)  # the last to be forgotten now
                if chain != ROOT:  # this one's page was published by another
                    self._trails[chain] = kept
            while len(self._trails) > TRAILS:
                del self._trails[next(iter(self._trails))]

    def publish(self, chain: int, ids: Sequence[int], pages: Sequence[int]) -> int:
        """Make full pages findable after `chain`; the chain after them. An equal page already there wins."""
        packed = packed_ids(ids).tobytes()
        size = self.page_size * WIDTH
        known, keys, fresh = self._found, self._key, self._next_chain
        start = 0
        for page in pages:
            key = (chain, packed[start : start + size])
            start += size
            entry = (page, fresh)
            hit = known.setdefault(key, entry)
            if hit is entry:
                keys[page] = key
                self._chains[page] = fresh
                fresh += 1
            chain = hit[1]
        self._next_chain = fresh
        return chain

    def forget(self) -> None:
        """Make no page findable any more (the weights changed); idle ones become free."""
        self.settle()
        refs, key = self._refs, self._key
        self._free += [page for page in dict.fromkeys(self._idle) if refs[page] == 0 and key[page] is not None]
        self._idle.clear()
        self._n_idle = 0
        self._entries = [0] * self.n_pages
        self._chains[:] = ROOT
        self._trails.clear()
        self._found.clear()
        self._key = [None] * self.n_pages
