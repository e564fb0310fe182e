"""One piece of a device's memory that models take turns in, and copies of weights into it."""

from __future__ import annotations

import time

import torch

from upshot.serving.swap.overlay import MemoryLayout, Region

PIECE = 32 << 20
"""Bytes copied at once: few enough for the small copies of other engines to get in between."""


class Arena:
    """The memory behind an overlay; whoever takes a place that is not free is refused."""

    def __init__(self, overlay: MemoryLayout, device: torch.device) -> None:
        self.overlay, self.device = overlay, device
        with torch.inference_mode(False):  # parameters become views of it
            self.memory = torch.empty(overlay.size, dtype=torch.uint8, device=device)
        self._settle()
        self.held: dict[str, Region] = {}
        """Who is there."""
        self.most = 0
        """The most bytes that were held at once."""

    def claim(self, place: Region) -> None:
        """The place is its model's from now on."""
        wrong = [other.name for other in self.held.values() if other.overlaps(place)]
        if wrong or place.stop > self.overlay.size:
            raise RuntimeError(f"the place of '{place.name}' is not free: {', '.join(wrong) or 'the arena is smaller'}")
        self.held[place.name] = place
        self.most = max(self.most, sum(held.size for held in self.held.values()))

    def free(self, place: Region) -> None:
        """The place is nobody's."""
        self.held.pop(place.name, None)

    def bytes_of(self, place: Region) -> torch.Tensor:
        """The place's memory; the same view whenever it is asked for."""
        return self.memory[place.start : place.stop]

    @property
    def there(self) -> bool:
        """Whether there is memory behind it."""
        return self.memory.untyped_storage().nbytes() > 0 or not self.overlay.size

    def release(self) -> None:
        """Give the memory back, when nobody is there; views of it stay and are valid again after `take`."""
        if self.held:
            raise RuntimeError(f"the arena is in use by {', '.join(self.held)}")
        self._settle()  # it was used on streams that its allocator knows nothing of
        self.memory.untyped_storage().resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _settle(self) -> None:
        """Nobody reads or writes the memory any more, or what it was before."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def take(self) -> None:
        """Take it again, perhaps elsewhere."""
        if not self.there:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what others cached lies where there must be one piece
            self.memory.untyped_storage().resize_(self.overlay.size)
            self._settle()


class HostCopy:
    """A copy from the host into the arena, piece by piece, while the device computes other things.

    On the CPU each look at it copies a piece, so that a load takes its time there, too.
    """

    def __init__(
        self, source: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream | None, piece: int = PIECE
    ) -> None:
        self.source, self.target, self.piece = source, target, piece
        self.seconds = 0.0
        """How long it took, once it is done."""
        self._at = 0
        self._end: torch.cuda.Event | None = None
        if stream is not None:
            self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                self._start.record()
                while self._at < len(source):
                    self._copy()
                self._end.record()

    def _copy(self) -> None:
        part = slice(self._at, self._at + self.piece)
        self.target[part].copy_(self.source[part], non_blocking=True)
        self._at += self.piece

    def poll(self) -> bool:
        """Whether it is done."""
        if self._end is None:
            started = time.perf_counter()
            if self._at < len(self.source):
                self._copy()
            self.seconds += time.perf_counter() - started
            return self._at >= len(self.source)
        if not self._end.query():
            return False
        self.seconds = self._start.elapsed_time(self._end) / 1000
        return True

    def wait(self) -> None:
        """Return when it is done."""
        if self._end is not None:
            self._end.synchronize()
        while not self.poll():
            pass
