"""An object of the other process: calls, attributes and observations of it are messages."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upshot.sandbox.inside.peer import Peer


def take_over(mine: Any, after: Any) -> None:
    """Make our copy of a mutable argument look as the call left the other one."""
    if type(mine) in (list, bytearray):
        mine[:] = after
    elif type(mine) in (dict, set):
        mine.clear()
        mine.update(after)
    elif type(mine) is deque:
        mine.clear()
        mine.extend(after)
    elif type(mine).__name__ == "ndarray":
        mine[...] = after


class Proxy:
    """An object of the other end."""

    __slots__ = ("_kind", "_number", "_peer")

    def __init__(self, peer: Peer, number: int, kind: str) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_kind", kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        peer = self._peer
        named = {name: peer.encode(item) for name, item in kwargs.items()}
        reply = peer.ask("call", target=self._number, args=[peer.encode(item) for item in args], kwargs=named)
        peer.guarded(self._take_over, reply, args, kwargs)
        return peer.value(reply)

    def _take_over(self, reply: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for key, after in reply["changed"]:
            take_over(kwargs[key] if key in kwargs else args[key], self._peer.decode(after))

    def __getattr__(self, name: str) -> Any:
        return self._peer.value(self._peer.ask("get", target=self._number, name=name))

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", target=self._number, name=name, args=[self._peer.encode(value)])

    def _observe(self, name: str, *args: Any) -> Any:
        encoded = [self._peer.encode(item) for item in args]
        reply = self._peer.ask("observe", target=self._number, name=name, args=encoded)
        if name == "next" and "end" in reply:
            raise StopIteration
        return self._peer.value(reply)

    def __len__(self) -> int:
        return self._observe("len")

    def __iter__(self) -> Any:
        return self._observe("iter")

    def __next__(self) -> Any:
        return self._observe("next")

    def __bool__(self) -> bool:
        return self._observe("bool")

    def __str__(self) -> str:
        return self._observe("str")

    def __repr__(self) -> str:
        return self._observe("repr")

    def __getitem__(self, key: Any) -> Any:
        return self._observe("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._observe("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self._observe("delitem", key)
