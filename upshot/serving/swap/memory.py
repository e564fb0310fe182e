"""Weights that are swapped: on the host in one page-locked piece, on the device in an arena of fixed regions.

Nobody trains these models, so weights are only ever copied from the host to the device, and a model that leaves is
simply overwritten. `pool.py` decides which models come and leave.
"""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from upshot.engine.llama.linear import neighbours
from upshot.serving.swap.layout import MemoryLayout, Region

log = logging.getLogger(__name__)
GROUP = 256
"""Parameters begin at a multiple of this many bytes, unless several are read as one tensor."""
PIECE = 32 << 20
"""Bytes per copy: small enough that the small copies of other engines can run in between."""


class Arena:
    """The memory behind a layout; taking a region that is not free is an error."""

    def __init__(self, layout: MemoryLayout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        with torch.inference_mode(False):  # parameters become views of it
            self.memory = torch.empty(layout.size, dtype=torch.uint8, device=device)
        self._synchronize()
        self.held: dict[str, Region] = {}
        """The models that are loaded or being loaded."""
        self.most = 0
        """The most bytes that were held at once."""

    def claim(self, region: Region) -> None:
        """Assign the region to its model."""
        wrong = [other.name for other in self.held.values() if other.overlaps(region)]
        if wrong:
            raise RuntimeError(f"the place of '{region.name}' is not free: {', '.join(wrong)}")
        self.held[region.name] = region
        self.most = max(self.most, sum(held.size for held in self.held.values()))

    def free(self, region: Region) -> None:
        """Mark the region as free."""
        self.held.pop(region.name, None)

    def bytes_of(self, region: Region) -> torch.Tensor:
        """The region's memory; always at the same addresses."""
        return self.memory[region.start : region.stop]

    @property
    def there(self) -> bool:
        """Whether there is memory behind it."""
        return self.memory.untyped_storage().nbytes() > 0 or not self.layout.size

    def release(self) -> None:
        """Release the memory, if no model is loaded; views of it stay and are valid again after `take`."""
        if self.held:
            raise RuntimeError(f"the arena is in use by {', '.join(self.held)}")
        self._synchronize()  # it was used on streams that its allocator does not know
        self.memory.untyped_storage().resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def take(self) -> None:
        """Allocate it again; at a different address, captured steps are no longer valid."""
        if not self.there:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # cached blocks may split the space where one piece is needed
            self.memory.untyped_storage().resize_(self.layout.size)
            self._synchronize()

    def _synchronize(self) -> None:
        """Wait until no stream reads or writes the memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class ParameterSpan:
    """Where one parameter lies in the flat memory."""

    parameter: torch.nn.Parameter
    shape: torch.Size
    start: int
    stop: int


def spans(module: torch.nn.Module) -> list[ParameterSpan]:
    """All parameters, ordered so that those that an engine joins are adjacent."""
    out: list[ParameterSpan] = []
    at = 0
    for group in neighbours(module):
        at = -(-at // GROUP) * GROUP
        for parameter in group:
            size = parameter.numel() * parameter.element_size()
            out.append(ParameterSpan(parameter, parameter.shape, at, at + size))
            at += size
    return out


class HostWeights:
    """The weights of a module that nobody trains, taken out of its own memory."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self.spans = spans(module)
        self.size = self.spans[-1].stop
        """Bytes."""
        self.flat = torch.empty(self.size, dtype=torch.uint8)
        if device.type == "cuda" and lock_pages(self.flat):
            # The memory stays until it is unlocked.
            weakref.finalize(self, unlock_pages, self.flat).atexit = False
        with torch.inference_mode(False), torch.no_grad():
            for span in self.spans:
                parameter = span.parameter.requires_grad_(False)
                self.flat[span.start : span.stop].copy_(parameter.data.reshape(-1).view(torch.uint8))
                parameter.data = parameter.data.new_empty(0)  # so that there are never two copies of all weights
            for buffer in module.buffers():
                buffer.data = buffer.data.to(device)

    def bind(self, memory: torch.Tensor) -> None:
        """Let the module read its weights from the first bytes of this memory, once they are copied there."""
        with torch.inference_mode(False), torch.no_grad():
            for span in self.spans:
                span.parameter.data = memory[span.start : span.stop].view(span.parameter.dtype).view(span.shape)


class HostCopy:
    """A copy from the host into the arena, piece by piece, while the device computes other things.

    On the CPU each check of its progress copies a piece, so that a load takes time there, too.
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
        """Wait until it is done."""
        if self._end is not None:
            self._end.synchronize()
        while not self.poll():
            pass


def lock_pages(memory: torch.Tensor) -> bool:
    """Lock memory in place, so that the device copies from it at full speed (torch would round up to twice as much)."""
    memory.zero_()  # allocates the pages with several threads: locking unallocated pages is slow
    cudart: Any = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code:
        size = memory.numel() / 2**30
        log.warning("%.1f GiB of weights cannot be locked in memory (CUDA error %d): loading them is slow", size, code)
    return not code


def unlock_pages(memory: torch.Tensor) -> None:
    """Unlock the memory, so that it can be freed."""
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(memory.data_ptr())
