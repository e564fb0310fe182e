"""The page pool: reference counts of KV pages, and the prefix cache. The scheduler takes and releases pages here.

Pure bookkeeping, no tensors; a page is a number. Page 0 is never assigned: padding writes its keys and values there. A
full page is *published* under the exact ids it holds and the *chain* of pages before it (a number for that prefix), so
equal prefixes are found without hash collisions. A published page without references is *idle*: it stays findable until
its space is needed, oldest first.

Looking up every page of a long prompt at every turn of a conversation would cost turns × tokens. So the pool remembers
the *trail* of a long finished sequence, its ids and pages; a prompt that begins alike follows it in one comparison.
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
"""A trail can be entered at every 64th of its pages; shorter sequences leave none."""
TRAILS = 4096
"""Entry points kept at most; the oldest are forgotten."""


def packed_ids(ids: Sequence[int]) -> array[int]:
    """Ids as 32-bit integers, which compare and hash twice as fast as a list."""
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
        """The key in `_found` of each published page."""
        self._chains = np.zeros(n_pages, dtype=np.int64)
        """The chain after each published page; ROOT if it is not published. Chains are never used twice."""
        self._trails: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        """Chain at an entry point → a trail: ids, pages, chain after each page."""
        self._idle: deque[int] = deque()
        """Pages that became idle, oldest first; a page may be in it several times, and only its last entry counts."""
        self._entries = [0] * n_pages
        """How often each page is in that queue."""
        self._n_idle = 0
        """How many pages are idle."""
        self._returned: list[Sequence[int]] = []
        """Page lists whose release was put off; their reference counts are not yet lowered."""
        self._next_chain = ROOT + 1
        self.hits = 0
        """Ids of admitted requests that were found in the prefix cache."""
        self.lookups = 0
        """Ids of admitted requests that could have been found."""

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
        """Pages with references (page 0 not counted)."""
        return self.n_pages - 1 - self.available

    @property
    def cached(self) -> int:
        """Pages that hold a findable prefix."""
        return len(self._found)

    def refs(self, page: int) -> int:
        """The page's reference count."""
        self.settle()
        return self._refs[page]

    def alone(self, page: int) -> bool:
        """Whether the page has a single reference."""
        return self._refs[page] == 1 or self.refs(page) == 1

    def take(self) -> int:
        """A page with one reference; evicts the oldest idle page if none is free."""
        if not self._free and not self.has(1):
            raise MemoryError("no page is free; check `available` before taking one")
        page = self._free.pop() if self._free else self._oldest_idle()
        self._refs[page] = 1
        return page

    def _oldest_idle(self) -> int:
        """Evict the page that has been idle for the longest time."""
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
        """`count` pages with one reference each."""
        free = self._free
        if count > len(free) or not count:
            return [self.take() for _ in range(count)]
        pages = free[: -count - 1 : -1]
        del free[-count:]
        for page in pages:
            self._refs[page] = 1
        return pages

    def hold_all(self, pages: Sequence[int]) -> None:
        """Add a reference to each page."""
        refs = self._refs
        for page in pages:
            if refs[page] == 0:
                self._n_idle -= 1
            refs[page] += 1

    def drop(self, page: int) -> None:
        """Remove a reference; the last one frees the page, or makes it idle if it is published."""
        self.drop_all((page,))

    def drop_all(self, pages: Sequence[int]) -> None:
        """Remove a reference to each page, the last first, so that ends of prefixes are evicted before beginnings."""
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
        """Drop a sequence's pages later: in `settle`, or when pages are needed."""
        self._returned.append(pages)

    def settle(self, most: int = 0) -> None:
        """Drop pages that were given back, of at most this many sequences (0: of all)."""
        if self._returned:
            count = most or len(self._returned)
            for pages in self._returned[:count]:
                self.drop_all(pages)
            del self._returned[:count]

    def _tidy(self) -> None:
        """Remove entries that do not count, so that the queue stays short."""
        entries, queue = self._entries, self._idle
        for _ in range(len(queue)):
            page = queue.popleft()
            if entries[page] == 1 and self._refs[page] == 0:
                queue.append(page)
            else:
                entries[page] -= 1

    def match(self, ids: Sequence[int], limit: int) -> tuple[list[int], int]:
        """Pages of the longest published prefix of `ids[:limit]`, with a reference added, and the chain after it."""
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
        return pages, chain

    def _follow(self, chain: int, ids: np.ndarray, pages: list[int]) -> int:
        """Append the pages that `ids` share with the trail at `chain`; returns the chain after them."""
        known, trail, chains = self._trails[chain]
        start, size = len(pages), self.page_size
        stop = min(len(ids) // size, len(trail))
        same = (ids[start * size : stop * size] == known[start * size : stop * size]).reshape(-1, size).all(1)
        # A page of the trail may have been evicted, or was never published because an equal one had been before.
        same &= (chains[start:stop] != ROOT) & (self._chains[trail[start:stop]] == chains[start:stop])
        stop = stop if same.all() else start + int(same.argmin())
        pages += trail[start:stop].tolist()
        return int(chains[stop - 1])

    def remember(self, ids: Sequence[int], pages: Sequence[int]) -> None:
        """Keep the trail of a finished sequence whose first `pages` were published, if it is long."""
        if len(pages) > STRIDE:
            trail = np.array(pages)
            kept = np.array(packed_ids(ids)), trail, self._chains[trail]
            for chain in kept[2][::STRIDE].tolist():
                self._trails.pop(chain, None)  # so that it becomes the newest
                if chain != ROOT:  # otherwise an equal page had been published before this one
                    self._trails[chain] = kept
            while len(self._trails) > TRAILS:
                del self._trails[next(iter(self._trails))]

    def publish(self, chain: int, ids: Sequence[int], pages: Sequence[int]) -> int:
        """Enter full pages into the prefix cache after `chain`, unless equal ones are there; the chain after them."""
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
        """Empty the prefix cache, because the weights changed; idle pages become free."""
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
