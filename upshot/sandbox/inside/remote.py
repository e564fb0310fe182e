"""The untrusted program answering a judge: it sees calls and arguments, never the test that makes them.

The judge asks, the program answers, one question at a time:

- {"op": "names", "names"}: which of these the program has, each as data or as a handle; of exceptions the names of
  their bases.
- {"op": "call", "target", "name", "args", "kwargs"}: call an object, or its method of that name.
- {"op": "get", "target", "name"}, {"op": "set", "target", "name", "args"}: attributes. What can be called is not
  handed over: {"method": true} says that there is something to call by that name.
- {"op": "look", "target", "name", "args"}: one of `LOOKS`, what Python's own syntax does with an object.

Lists, dictionaries and the like are copied on their way. What a call changed in place among its arguments comes with
the answer: {"changed": [[index, value], …]}.

{"ok"} or {"error"} answers, {"unreadable"} where a value cannot be carried. A handle is a number: `exports` keeps the
object for as long as the process lives, so that the same object always has the same number. All of this runs in the
program's own process and may be bent by it: nothing here is believed for what it does, only the data it gives is looked
at.
"""

from __future__ import annotations

import itertools
import json
import operator
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from upshot.sandbox.inside import cases, plain, program
from upshot.sandbox.inside.handle import MOST_ITEMS

MAX_MESSAGE = 16 << 20


def _list_items(target: Any) -> Any:
    """All items of a container; None of an iterator, which is asked for one after the other (`take`)."""
    iterator = iter(target)
    return None if iterator is target else list(itertools.islice(iterator, MOST_ITEMS + 1))


LOOKS: dict[str, Callable[..., Any]] = {
    "len": len, "str": str, "repr": repr, "bool": bool, "items": _list_items,
    "take": lambda target: list(itertools.islice(target, 1)),
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem,
}  # fmt: skip


class Wire:
    """Whole JSON messages over a stream socket: four bytes of length, then the text."""

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


_DATA = tuple(base for base, _ in plain.BASES)


class Unreadable(BaseException):
    """A value that cannot be carried: not an exception of the program's, and none that a test may expect."""


class JudgedProgram:
    """The loaded program, and the objects of it that the judge has handles to."""

    def __init__(self, wire: Wire, namespace: dict[str, Any]) -> None:
        self.wire = wire
        self.namespace = namespace
        self.exports: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what the judge asks, or say what came of trying."""
        try:
            return self._tell_names(message["names"]) if message["op"] == "names" else self._perform(message)
        except Unreadable as error:
            return {"unreadable": str(error)}

    def _tell_names(self, names: list[str]) -> dict[str, Any]:
        found = [(name, self.namespace[name]) for name in names if name in self.namespace]
        return {"ok": [[name, self.encode(v), _name_bases(v)] for name, v in found]}

    def _perform(self, message: dict[str, Any]) -> dict[str, Any]:
        op, name, target = message["op"], message["name"], self.exports[message["target"]]
        args = [self._take(item) for item in message["args"]]
        kwargs = {key: self._take(item) for key, item in message["kwargs"].items()}
        values = [*args, *kwargs.values()]
        before = [self.encode(value) for value in values]
        try:
            if op == "set":
                setattr(target, name, *args)
                return {"ok": None}
            if op == "get":
                value = getattr(target, name)
                is_method = callable(value) and not isinstance(value, type)
                return {"method": True} if is_method else {"ok": self.encode(value)}
            function = LOOKS[name] if op == "look" else getattr(target, name) if name else target
            value = function(*([target] if op == "look" else []), *args, **kwargs)
            # What a class makes is an object to the test, with methods of its own, though it may be a list as well.
            made = function is target and type(value) is target and issubclass(target, _DATA)
            answer = {"ok": self._export(value) if made else self.encode(value)}
        except Unreadable:
            raise
        except BaseException as error:
            answer = {"error": self._describe(error)}
        after = [self.encode(value) for value in values]
        pairs = enumerate(zip(before, after, strict=True))
        return answer | {"changed": [[index, now] for index, (was, now) in pairs if was != now]}

    def _take(self, data: Any) -> Any:
        """An argument."""
        return _intern(plain.decode(data, lambda number, _: self.exports[number]))

    def encode(self, value: Any) -> Any:
        """A value for the judge: data as data, objects as handles."""
        try:
            return plain.encode(value, self._export)
        except Exception as error:  # nested too deeply, or an object whose class is hostile
            raise Unreadable(f"{type(error).__name__}: {error}"[:300]) from None

    def _export(self, value: Any) -> dict[str, Any]:
        number = self.numbers.setdefault(id(value), len(self.numbers) + 1)
        self.exports[number] = value
        return {"o": [number, str(type.__getattribute__(type(value), "__name__"))[:100]]}

    def _describe(self, error: BaseException) -> dict[str, Any]:
        """An exception for the judge: its classes by name, its words, what it carries."""
        name, tail = program.describe(error)
        described: dict[str, Any] = {"bases": [base.__name__ for base in type(error).__mro__], "tail": tail}
        try:
            state = {key: value for key, value in vars(error).items() if not key.startswith("_")}
            return {**described, "text": str(error)[:500], "args": self.encode(error.args), "state": self.encode(state)}
        except BaseException:
            return {**described, "text": name, "args": {"t": []}, "state": {"d": []}}


def _intern(value: Any) -> Any:
    """Texts as literals of the test's would be: some programs ask `word is "add"`."""
    if type(value) is str:
        return sys.intern(value)
    if type(value) is list:
        value[:] = map(_intern, value)
    elif type(value) is dict:
        value.update({key: _intern(item) for key, item in value.items()})
    return value


def _name_bases(value: Any) -> list[str] | None:
    """The classes of an exception class, by name."""
    if not isinstance(value, type) or not issubclass(value, BaseException):
        return None
    return [base.__name__ for base in value.__mro__]


def serve(payload: dict[str, Any], descriptor: int) -> None:
    """Load the program, then answer the judge until it hangs up."""
    wire, failure, namespace = Wire(descriptor), None, {}
    try:
        namespace = program.load(payload["program"], "program")
        namespace[cases.PROGRAM] = sys.modules["program"]
        namespace["__name__"] = "__main__"  # as in the plain look, when its functions are called
    except BaseException as error:
        failure = program.describe(error)
    judged = JudgedProgram(wire, namespace)
    wire.send({"ok": failure})
    while True:
        try:
            message = wire.receive()
        except (EOFError, OSError):
            return  # the judge has spoken
        wire.send(judged.answer(message))
