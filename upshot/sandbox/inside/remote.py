"""The untrusted program answering a judge: it sees calls and arguments, never the test that makes them.

The judge asks, the program answers, one question at a time:

- {"op": "names", "names"}: which of these the program has, each as data or as a handle; of exceptions the names of
  their bases, of what a library gave it where it comes from.
- {"op": "call", "target", "name", "args", "kwargs"}: call an object, or its method of that name.
- {"op": "get", "target", "name"}, {"op": "set", "target", "name", "args"}: attributes. What can be called is not
  handed over: {"method": true} says that there is something to call by that name.
- {"op": "look", "target", "name", "args"}: one of `LOOKS`, what Python's own syntax does with an object.

Lists, dictionaries and the like are copied on their way, and a program may go on changing its own: an argument in
place, a list that it handed out. So both sides count the copies, in the order they are made (arguments, then the
value), the judge says with every question which of them the test still holds ("held"), and every answer says which
look otherwise by now ("changed").

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
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "neg", "abs")


def _list_items(target: Any) -> Any:
    """All items of a container; None of an iterator, which is asked for one after the other (`take`)."""
    iterator = iter(target)
    return None if iterator is target else list(itertools.islice(iterator, MOST_ITEMS + 1))


LOOKS: dict[str, Callable[..., Any]] = {
    "len": len, "str": str, "repr": repr, "bool": bool, "items": _list_items,
    "take": lambda target: list(itertools.islice(target, 1)), "contains": operator.contains,
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem,
    "enter": lambda target: type(target).__enter__(target),
    "exit": lambda target: type(target).__exit__(target, None, None, None),
    **{name: getattr(operator, name) for name in _ARITHMETIC},
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


class Unreadable(BaseException):
    """A value that cannot be carried: not an exception of the program's, and none that a test may expect."""


class JudgedProgram:
    """The loaded program, and the objects of it that the judge has handles to."""

    def __init__(self, wire: Wire, namespace: dict[str, Any]) -> None:
        self.wire = wire
        self.namespace = namespace
        self.exports: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self.copied = 0
        self.copies: dict[int, tuple[Any, Any]] = {}
        """By the number of the copy, our own of what the judge has, too, and how it looked when it was last told."""

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what the judge asks, or say what came of trying; and what of all that was copied looks otherwise now."""
        self.copies = {number: self.copies[number] for number in message["held"]}
        try:
            answer = self._perform(message)
            after = {number: self.encode(value) for number, (value, _) in self.copies.items()}
        except Unreadable as error:
            return {"unreadable": str(error)}
        changed = [[number, now] for number, now in after.items() if now != self.copies[number][1]]
        self.copies |= {number: (self.copies[number][0], now) for number, now in changed}
        return {**answer, "changed": changed}

    def _perform(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["op"] == "names":
            found = [(name, self.namespace[name]) for name in message["names"] if name in self.namespace]
            data = [self.encode(value) for _, value in found]
            for (_, value), encoded in zip(found, data, strict=True):
                self._remember(value, encoded)
            rows = zip(found, data, strict=True)
            return {"ok": [[name, encoded, _name_bases(v), _name_home(v)] for (name, v), encoded in rows]}
        op, name, target = message["op"], message["name"], self.exports[message["target"]]
        args = [self._take(item) for item in message["args"]]
        kwargs = {key: self._take(item) for key, item in message["kwargs"].items()}
        try:
            if op == "set":
                setattr(target, name, *args)
                return {"ok": None}
            if op == "get":
                value = getattr(target, name)
                return (
                    {"method": True} if callable(value) and not isinstance(value, type) else {"ok": self._give(value)}
                )
            function = LOOKS[name] if op == "look" else getattr(target, name) if name else target
            return {"ok": self._give(function(*([target] if op == "look" else []), *args, **kwargs))}
        except Unreadable:
            raise
        except BaseException as error:
            return {"error": self._describe(error)}

    def _take(self, data: Any) -> Any:
        """An argument; of one that is a copy we remember how it looks."""
        value = _intern(plain.decode(data, lambda number, _: self.exports[number]))
        self._remember(value, self.encode(value))
        return value

    def _give(self, value: Any) -> Any:
        """A value for the judge; of one that is copied we remember how it looked."""
        data = self.encode(value)
        self._remember(value, data)
        return data

    def _remember(self, value: Any, data: Any) -> None:
        if plain.is_copied(data):
            self.copied += 1
            self.copies[self.copied] = (value, data)

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


def _name_home(value: Any) -> str:
    """The module that a class or function says it is from."""
    return str(getattr(value, "__module__", "")) if callable(value) else ""


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
