"""Whole JSON messages over a stream socket: four bytes of length, then the text. Knows nothing of what is said."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

MAX_MESSAGE = 16 << 20


class Wire:
    """One end of a conversation between two processes."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        data = json.dumps(message, separators=(",", ":")).encode()
        self.socket.sendall(struct.pack("<I", len(data)) + data)

    def receive(self) -> dict[str, Any]:
        """The next message; raises some exception at the end and for anything that is not one."""
        (size,) = struct.unpack("<I", self._read_exactly(4))
        if size > MAX_MESSAGE:
            raise ValueError(f"a message of {size} bytes is over the limit of {MAX_MESSAGE}")
        message = json.loads(self._read_exactly(size))
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message

    def _read_exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, 1 << 20))
            if not part:
                raise EOFError("the other process has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
