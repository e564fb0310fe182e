"""Pages of the KV cache: who holds which, which hold a known prefix, which can be taken.

Pure bookkeeping, no tensors. A page is a number. Page 0 belongs to nobody: kernels may write there what nobody reads.
A published page is found again by the exact tokens it holds and by what came before it, so prefixes are shared
without hashing and a wrong match is impossible. A page nobody holds stays findable until its space is needed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

ROOT = 0
"""The chain of the empty prefix."""
WIDTH = array("i").itemsize


def packed_ids(ids: Sequence[int]) -> array[int]:
    """Ids as machine integers: half the price to compare and to hash."""
    return ids if isinstance(ids, array) else array("i", ids)


class PagePool:
    """Reference-counted pages with a cache of published prefixes."""

    def __init__(self, n_pages: int, page_size: int) -> None:
        if n_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (page 0 is nobody's), got {n_pages}")
        self.page_size = page_size
        self.n_pages = n_pages
        self._free = list(range(n_pages - 1, 0, -1))
        self._refs = [0] * n_pages
        self._refs[0] = 1
        self._found: dict[tuple[int, bytes], tuple[int, int]] = {}
        """(chain before, packed ids) → (page, chain after)."""
        self._key: dict[int, tuple[int, bytes]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Published pages that nobody holds, oldest first."""
        self._next_chain = ROOT + 1
        self.hits = 0
        self.lookups = 0

    @property
    def available(self) -> int:
        """Pages that could be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Pages that somebody holds (page 0 not counted)."""
        return self.n_pages - 1 - self.available

    @property
    def cached(self) -> int:
        """Pages that hold a findable prefix."""
        return len(self._key)

    def refs(self, page: int) -> int:
        """How many hold the page."""
        return self._refs[page]

    def take(self) -> int:
        """A page for one holder; the oldest idle prefix makes room if no page is free."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            del self._found[self._key.pop(page)]
        else:
            raise MemoryError("no page is free; check `available` before taking one")
        self._refs[page] = 1
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
                del self._idle[page]
            refs[page] += 1

    def drop(self, page: int) -> None:
        """One holder less; the last one frees it, or leaves it findable if it was published."""
        refs = self._refs[page] - 1
        if refs < 0:
            raise RuntimeError(f"page {page} was dropped more often than held")
        self._refs[page] = refs
        if refs == 0:
            if page in self._key:
                self._idle[page] = None
            else:
                self._free.append(page)

    def drop_all(self, pages: Sequence[int]) -> None:
        """Drop a sequence's pages, the last first, so that the ends of prefixes are reused before their beginnings."""
        counts, key = self._refs, self._key
        for page in reversed(pages):
            if counts[page] > 1:
                counts[page] -= 1
            elif counts[page] == 1 and page in key:
                counts[page] = 0
                self._idle[page] = None
            else:
                self.drop(page)

    def match(self, ids: Sequence[int], limit: int) -> tuple[list[int], int]:
        """Pages (now held) that hold the longest published prefix of `ids[:limit]`, and the chain after them."""
        packed = packed_ids(ids).tobytes()
        size = self.page_size * WIDTH
        pages: list[int] = []
        chain = ROOT
        for start in range(0, limit * WIDTH - size + 1, size):
            hit = self._found.get((chain, packed[start : start + size]))
            if hit is None:
                break
            page, chain = hit
            pages.append(page)
        self.hold_all(pages)
        self.lookups += limit
        self.hits += len(pages) * self.page_size
        return pages, chain

    def publish(self, chain: int, ids: Sequence[int], pages: Sequence[int]) -> int:
        """Make full pages findable after `chain`; the chain after them. An equal page already there wins."""
        packed = packed_ids(ids).tobytes()
        size = self.page_size * WIDTH
        for index, page in enumerate(pages):
            key = (chain, packed[index * size : (index + 1) * size])
            hit = self._found.get(key)
            if hit is not None:
                chain = hit[1]
                continue
            chain = self._next_chain
            self._next_chain += 1
            self._found[key] = (page, chain)
            self._key[page] = key
        return chain

    def forget(self) -> None:
        """Make no page findable any more (the weights changed); idle ones become free."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._found.clear()
        self._key.clear()
