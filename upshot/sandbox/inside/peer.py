"""Two confined processes talking: length-prefixed JSON on a socket pair, either side may call while it waits."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from upshot.sandbox.inside import plain

MAX_MESSAGE = 16 << 20


class PeerGone(Exception):
    """The other process ended before it answered."""


class Wire:
    """Whole JSON messages over a stream socket."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; raises PeerGone if nobody is there."""
        data = json.dumps(message, separators=(",", ":")).encode()
        try:
            self.socket.sendall(struct.pack("<I", len(data)) + data)
        except OSError as error:
            raise PeerGone(str(error)) from error

    def receive(self) -> dict[str, Any]:
        """The next message; raises PeerGone at the end."""
        (size,) = struct.unpack("<I", self._exactly(4))
        if size > MAX_MESSAGE:
            raise PeerGone(f"a message of {size} bytes is over the limit of {MAX_MESSAGE}")
        message = json.loads(self._exactly(size))
        if not isinstance(message, dict):
            raise PeerGone("not a message")
        return message

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, 1 << 20))
            if not part:
                raise PeerGone("the other process has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class Peer:
    """One end: asks, answers what is asked meanwhile, keeps the objects the other end has handles to."""

    def __init__(self, descriptor: int) -> None:
        self.wire = Wire(descriptor)
        self.exports: list[Any] = [None]

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Ask the other end and wait for its answer."""
        self.wire.send(message)
        while True:
            reply = self.wire.receive()
            if "op" not in reply:
                return reply
            self.wire.send(self.handle(reply))

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer one request of the other end."""
        raise NotImplementedError

    def proxy(self, handle: int, kind: str) -> Any:
        """What stands here for an object of the other end."""
        raise NotImplementedError

    def handle_of(self, value: Any) -> int | None:
        """The other end's handle if the value is one of its objects."""
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        """A value for the other end: data as data, objects as handles."""
        return plain.encode(value, self._export)

    def decode(self, data: Any) -> Any:
        """A value from the other end; a negative handle is one of our own objects."""
        return plain.decode(
            data, lambda handle, kind: self.exports[-handle] if handle < 0 else self.proxy(handle, kind)
        )

    def _export(self, value: Any) -> dict[str, Any]:
        theirs = self.handle_of(value)
        if theirs is not None:
            return {"o": [-theirs, ""]}
        for index, known in enumerate(self.exports):
            if known is value and index:
                return {"o": [index, type(value).__name__[:100]]}
        self.exports.append(value)
        return {"o": [len(self.exports) - 1, type(value).__name__[:100]]}

    def call(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Call a local object with encoded arguments; mutable ones go back as the call left them."""
        positional = [self.decode(item) for item in args]
        value = target(*positional, **{name: self.decode(item) for name, item in kwargs.items()})
        after = [self.encode(item) if type(item) in (list, dict, set, bytearray) else None for item in positional]
        return {"ok": self.encode(value), "args": after}
