"""Weights that come and go: on the host in one page-locked piece, on the device in an arena of fixed regions.

Nobody trains these models, so a copy only ever goes from the host to the device, and who leaves is simply overwritten.
Who comes and who leaves is decided in `pool.py`.
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
"""Parameters that are not read as one tensor begin at a multiple of this many bytes."""
PIECE = 32 << 20
"""Bytes copied at once: few enough for the small copies of other engines to get in between."""


class Arena:
    """The memory behind a layout; whoever takes a region that is not free is refused."""

    def __init__(self, layout: MemoryLayout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        with torch.inference_mode(False):  # parameters become views of it
            self.memory = torch.empty(layout.size, dtype=torch.uint8, device=device)
        self._synchronize()
        self.held: dict[str, Region] = {}
        """Who is there, or on its way."""
        self.most = 0
        """The most bytes that were held at once."""

    def claim(self, region: Region) -> None:
        """The region is its model's from now on."""
        wrong = [other.name for other in self.held.values() if other.overlaps(region)]
        if wrong:
            raise RuntimeError(f"the place of '{region.name}' is not free: {', '.join(wrong)}")
        self.held[region.name] = region
        self.most = max(self.most, sum(held.size for held in self.held.values()))

    def free(self, region: Region) -> None:
        """The region is nobody's."""
        self.held.pop(region.name, None)

    def bytes_of(self, region: Region) -> torch.Tensor:
        """The region's memory; the same addresses whenever it is asked for."""
        return self.memory[region.start : region.stop]

    @property
    def there(self) -> bool:
        """Whether there is memory behind it."""
        return self.memory.untyped_storage().nbytes() > 0 or not self.layout.size

    def release(self) -> None:
        """Give the memory back, when nobody is there; views of it stay and are valid again after `take`."""
        if self.held:
            raise RuntimeError(f"the arena is in use by {', '.join(self.held)}")
        self._synchronize()  # it was used on streams that its allocator knows nothing of
        self.memory.untyped_storage().resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def take(self) -> None:
        """Take it again, perhaps elsewhere: then steps that were captured are not valid any more."""
        if not self.there:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what others cached lies where there must be one piece
            self.memory.untyped_storage().resize_(self.layout.size)
            self._synchronize()

    def _synchronize(self) -> None:
        """Nobody reads or writes the memory any more, or what it was before."""
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
    """All parameters, in an order in which those that an engine joins lie side by side."""
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
                parameter.data = parameter.data.new_empty(0)  # so that there is never a second copy of all
            for buffer in module.buffers():
                buffer.data = buffer.data.to(device)

    def bind(self, memory: torch.Tensor) -> None:
        """Let the module read its weights in the first bytes of this memory, whenever somebody writes them there."""
        with torch.inference_mode(False), torch.no_grad():
            for span in self.spans:
                span.parameter.data = memory[span.start : span.stop].view(span.parameter.dtype).view(span.shape)


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


def lock_pages(memory: torch.Tensor) -> bool:
    """Lock memory in place, so that the device copies from it at full speed (torch would round up to twice as much)."""
    memory.zero_()  # by several threads: locking pages that are not there yet is slow
    cudart: Any = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code:
        size = memory.numel() / 2**30
        log.warning("%.1f GiB of weights cannot be locked in memory (CUDA error %d): loading them is slow", size, code)
    return not code


def unlock_pages(memory: torch.Tensor) -> None:
    """The memory can go."""
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(memory.data_ptr())
