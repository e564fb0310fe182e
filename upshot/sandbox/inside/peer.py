"""Two confined processes talking: whole JSON messages on a socket pair, either side may ask while it waits.

Data crosses as data (`plain.py`), everything else as a handle. What can be done with a handle is a call, an attribute,
or one of a few observations (`len`, `iter`, `next`, an item, the text, the truth): each gives data or another handle.

A message is four bytes of length and JSON. {"op", "target", "name", "args", "kwargs"} asks: call, get, set, observe
(and `names`, of the program alone). {"ok"}, {"error"} or {"end"} answers; a call also says which mutable arguments it
changed. While one side waits for an answer it serves what the other asks (a callback that a test gave the program), so
questions nest like calls on one stack, and the lock `turn` keeps threads from crossing them.

Handles are numbers: the owner's `exports` keeps the object for as long as the process lives. A number comes back
negated to its owner, who then has its own object again. Neither side believes the other: whatever goes wrong while a
message is read (`guarded`) ends the conversation for good, and never becomes an exception that a test could expect.
"""

from __future__ import annotations

import builtins
import itertools
import json
import operator
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from upshot.sandbox.inside import plain, program

MAX_MESSAGE = 16 << 20
OBSERVATIONS: dict[str, Callable[..., Any]] = {
    "len": len, "iter": iter, "next": next, "str": str, "repr": repr, "bool": bool, "isinstance": isinstance,
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem,
    "enter": lambda target: type(target).__enter__(target), "await": lambda target: _awaited(target),
    "exit": lambda target: type(target).__exit__(target, None, None, None),
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "contains")},
}  # fmt: skip
TAKE_SECONDS = 0.002
"""How long an iterator is asked for more than the one item that is wanted now."""
CONTROL = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt)
"""Exceptions that steer loops and generators: one of the other side's must not steer ours."""


class PeerGone(BaseException):
    """The other process ended, or sent what nobody can read."""


class Wire:
    """Whole JSON messages over a stream socket."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        data = json.dumps(message, separators=(",", ":")).encode()
        self.socket.sendall(struct.pack("<I", len(data)) + data)

    def receive(self) -> dict[str, Any]:
        """The next message; raises some exception at the end and for anything that is not one."""
        (size,) = struct.unpack("<I", self._exactly(4))
        if size > MAX_MESSAGE:
            raise ValueError(f"a message of {size} bytes is over the limit of {MAX_MESSAGE}")
        message = json.loads(self._exactly(size))
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, 1 << 20))
            if not part:
                raise EOFError("the other process has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class Peer:
    """One end: asks, answers what is asked meanwhile, keeps the objects the other end has handles to."""

    def __init__(self, descriptor: int) -> None:
        self.wire = Wire(descriptor)
        self.exports: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self.proxies: dict[Any, Any] = {}
        self.classes: dict[str, Any] = {}
        self.late: dict[int, BaseException] = {}
        """What an iterator raised behind items that were still handed over."""
        self.turn = threading.RLock()
        """One question at a time, whatever threads a test or the program has."""
        self.gone = ""
        """Why the other end cannot be talked to any more."""

    def permit(self, op: str, target: Any, name: str) -> None:
        """Raise where the other end may not do this to one of our objects."""

    def proxy(self, number: int, kind: str) -> Any:
        """What stands here for an object of the other end: always the same for the same object."""
        if number not in self.proxies:
            self.proxies[number] = Proxy(self, number, kind)
        return self.proxies[number]

    def guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of working on what the other end sent; whatever goes wrong ends the conversation."""
        if self.gone:
            raise PeerGone(self.gone)
        try:
            return function(*args)
        except Exception as error:
            self.gone = f"{error}" if isinstance(error, EOFError) else f"unreadable message: {error!r}"[:300]
            raise PeerGone(self.gone) from None

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Ask the other end; its failure is raised here as the exception it was there."""
        with self.turn:
            self.guarded(self.wire.send, {"op": op, **fields})
            while "op" in (reply := self.guarded(self.wire.receive)):
                self.guarded(self.wire.send, self.answer(reply))
        self.guarded(self.received, reply)
        if "error" in reply:
            raise self.guarded(self.rebuilt, reply["error"])
        return reply

    def received(self, reply: dict[str, Any]) -> None:
        """Look at a reply before it is used."""

    def value(self, reply: dict[str, Any]) -> Any:
        """The value of a reply."""
        return self.guarded(lambda: self.decode(reply["ok"]))

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what the other end asks, or say what came of trying."""
        try:
            return self.perform(message)
        except BaseException as error:
            if isinstance(error, PeerGone):
                raise
            if message.get("name") == "next" and isinstance(error, StopIteration):
                return {"end": True}
            return {"error": self.described(error)}

    def perform(self, message: dict[str, Any]) -> dict[str, Any]:
        """Call one of our objects, read or set an attribute of it, observe it."""
        op, name, target = message["op"], message.get("name", ""), self.exports[message["target"]]
        self.permit(op, target, name)
        if op == "call":
            return self._call(target, message["args"], message["kwargs"])
        if op == "get":
            return {"ok": self.encode(getattr(target, name))}
        args = [self.decode(item) for item in message["args"]]
        if name == "take":
            return {"ok": self._taken(message["target"], target, *args)}
        if op == "set":
            setattr(target, name, *args)
            return {"ok": None}
        return {"ok": self.encode(OBSERVATIONS[name](target, *args))}

    def _call(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The value of a call, and those of its mutable arguments that it changed."""
        positional = [self.decode(item) for item in args]
        named = {name: self.decode(item) for name, item in kwargs.items()}
        value = self.encode(target(*positional, **named))
        given: list[tuple[int | str, Any, Any]] = [(index, args[index], item) for index, item in enumerate(positional)]
        given += [(name, kwargs[name], item) for name, item in named.items()]
        after = ((key, before, self.encode(item)) for key, before, item in given if mutable(item))
        return {"ok": value, "changed": [[key, now] for key, before, now in after if now != before]}

    def _taken(self, number: int, iterator: Any, most: int) -> list[Any]:
        """The next items of an iterator, fewer where they take long, none at its end."""
        if number in self.late:
            raise self.late.pop(number)
        items: list[Any] = []
        enough = time.perf_counter() + TAKE_SECONDS
        try:
            for item in itertools.islice(iterator, most):
                items.append(self.encode(item))
                if time.perf_counter() > enough:
                    break
        except BaseException as error:
            if not items:
                raise
            self.late[number] = error
        return items

    def encode(self, value: Any) -> Any:
        """A value for the other end: data as data, objects as handles."""
        return plain.encode(value, self._export)

    def decode(self, data: Any) -> Any:
        """A value from the other end; a negative handle is one of our own objects."""
        return plain.decode(
            data, lambda number, kind: self.exports[-number] if number < 0 else self.proxy(number, kind)
        )

    def _export(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Proxy):
            return {"o": [-object.__getattribute__(value, "_number"), ""]}
        table = plain.encode_table(value, self.encode)
        if table is not None:
            return table
        number = self.numbers.setdefault(id(value), len(self.numbers) + 1)
        self.exports[number] = value
        return {"o": [number, str(type.__getattribute__(type(value), "__name__"))[:100]]}

    def described(self, error: BaseException) -> dict[str, Any]:
        """An exception for the other end."""
        name, tail = program.describe(error)
        described: dict[str, Any] = {"bases": [base.__name__ for base in type(error).__mro__], "tail": tail}
        try:
            state = {key: value for key, value in vars(error).items() if not key.startswith("_")}
            return {**described, "text": str(error)[:500], "args": self.encode(error.args), "state": self.encode(state)}
        except BaseException:
            return {**described, "text": name, "args": {"t": []}, "state": {"d": []}}

    def rebuilt(self, error: dict[str, Any]) -> BaseException:
        """The other end's exception as the nearest class known here that does not steer loops."""
        text, args, state = str(error["text"]), self.decode(error["args"]), self.decode(error["state"])
        for kind in (self.classes.get(base) or _exception(base) for base in error["bases"]):
            try:
                made: BaseException = kind(*args)
                made = made if str(made) == text else kind(text)
            except Exception:
                continue  # not a class known here, or one that wants other arguments
            made.__dict__.update({str(key): value for key, value in state.items()})
            made.__dict__["remote_tail"] = str(error["tail"])
            return made
        raise ValueError("an exception of no known class")


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


def _exception(name: str) -> Any:
    found = getattr(builtins, name, None)
    known = isinstance(found, type) and issubclass(found, BaseException) and not issubclass(found, CONTROL)
    return found if known else None


def _awaited(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


def mutable(value: Any) -> bool:
    """Whether a call may change a value in place."""
    return type(value) in (list, dict, set, bytearray, deque) or type(value).__name__ == "ndarray"


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
