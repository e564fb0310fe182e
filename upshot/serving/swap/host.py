"""A frozen model's weights in one flat, page-locked piece of the host's memory: what it comes back from."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from upshot.engine.llama.linear import neighbours

log = logging.getLogger(__name__)
GROUP = 256
"""Parameters that are not read as one tensor begin at a multiple of so many bytes."""


@dataclass(frozen=True)
class ParameterSpan:
    """Where one parameter lies in the flat memory."""

    parameter: torch.nn.Parameter
    shape: torch.Size
    start: int
    stop: int


def pieces(module: torch.nn.Module) -> list[ParameterSpan]:
    """All parameters, in an order in which those that an engine joins lie side by side."""
    found: list[ParameterSpan] = []
    at = 0
    for group in neighbours(module):
        at = -(-at // GROUP) * GROUP
        for parameter in group:
            size = parameter.numel() * parameter.element_size()
            found.append(ParameterSpan(parameter, parameter.shape, at, at + size))
            at += size
    return found


class HostWeights:
    """The weights of a module that nobody trains, taken out of its own memory."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self.pieces = pieces(module)
        self.size = self.pieces[-1].stop
        """Bytes."""
        self.flat = torch.empty(self.size, dtype=torch.uint8)
        if device.type == "cuda" and lock_pages(self.flat):
            # The memory stays until it is unlocked.
            weakref.finalize(self, unlock_pages, self.flat).atexit = False
        with torch.inference_mode(False), torch.no_grad():
            for piece in self.pieces:
                own = piece.parameter.requires_grad_(False)
                self.flat[piece.start : piece.stop].copy_(own.data.reshape(-1).view(torch.uint8))
                own.data = own.data.new_empty(0)  # so that there is never a second copy of all
            for buffer in module.buffers():
                buffer.data = buffer.data.to(device)

    def bind(self, memory: torch.Tensor) -> None:
        """Let the module read its weights in the first bytes of this memory, whenever somebody writes them there."""
        with torch.inference_mode(False), torch.no_grad():
            for piece in self.pieces:
                there = memory[piece.start : piece.stop].view(piece.parameter.dtype).view(piece.shape)
                piece.parameter.data = there


def lock_pages(memory: torch.Tensor) -> bool:
    """Lock memory in place, so that the device copies from it at full speed (torch would round up to twice as much)."""
    memory.zero_()  # by several threads: locking pages that are not there yet is slow
    cudart: Any = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code:
        log.warning(
            "%.1f GiB of weights cannot be locked in memory (CUDA error %d): loading them is slow",
            memory.numel() / 2**30,
            code,
        )
    return not code


def unlock_pages(memory: torch.Tensor) -> None:
    """The memory can go."""
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(memory.data_ptr())
