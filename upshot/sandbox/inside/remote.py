"""The untrusted program answers a judge: it sees calls and arguments, never the test that makes them.

The judge asks, the program answers, one question at a time:

- {"op": "names", "names"}: which of these the program has, each as data or as a handle.
- {"op": "call", "target", "name", "args", "kwargs"}: call an object, or its method of that name.
- {"op": "get", "target", "name"}: an attribute. A callable is not sent: {"method": true} says that there is something
  to call under that name.
- {"op": "set", "target", "name", "args"}: set an attribute.

The answer is {"ok"} or {"error"}, or {"unreadable"} if a value cannot be carried. A handle is a number: `exports` keeps
the object as long as the process lives. Data is copied on its way. All of this runs in the program's own process, which
may manipulate it: nothing here is trusted, and only the data that it sends is examined.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from upshot.sandbox.inside import plain, program

MAX_MESSAGE = 16 << 20


class Wire:
    """JSON messages over a stream socket, one line each."""

    def __init__(self, descriptor: int) -> None:
        self.lines = socket.socket(fileno=descriptor).makefile("rwb")

    def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        self.lines.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        self.lines.flush()

    def receive(self) -> dict[str, Any]:
        """The next message; raises some exception at the end, and for an invalid one."""
        line = self.lines.readline(MAX_MESSAGE)
        if len(line) == MAX_MESSAGE:
            raise ValueError(f"a message of {MAX_MESSAGE} bytes or more")
        if not line.endswith(b"\n"):
            raise EOFError("the other process has ended")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message


class JudgedProgram:
    """The loaded program, and its objects to which the judge has handles."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.exports: list[Any] = []

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what the judge asks, and return the result or the error."""
        try:
            if message["op"] == "names":
                names = [name for name in message["names"] if name in self.namespace]
                return {"ok": [[name, self.encode(self.namespace[name])] for name in names]}
            return self._perform(**message)
        except plain.Unreadable as error:
            return {"unreadable": str(error)}
        except BaseException as error:
            bases = [base.__name__ for base in type(error).__mro__]
            try:
                return {"error": {"bases": bases, "text": str(error)[:500], "args": self.encode(error.args)}}
            except BaseException:
                return {"error": {"bases": bases, "text": "", "args": {"t": []}}}

    def _perform(self, op: str, target: int, name: str, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        thing, values = self.exports[target], [self._take(item) for item in args]
        if op == "set":
            setattr(thing, name, *values)
            return {"ok": None}
        if op == "get":
            value = getattr(thing, name)
            is_method = callable(value) and not isinstance(value, type)
            return {"method": True} if is_method else {"ok": self.encode(value)}
        value = (getattr(thing, name) if name else thing)(*values, **{key: self._take(kwargs[key]) for key in kwargs})
        # An instance of a class is an object with methods for the test, even if it is a list as well.
        made = not name and type(value) is thing and issubclass(thing, tuple(plain.BASES))
        return {"ok": self._export(value) if made else self.encode(value)}

    def _take(self, data: Any) -> Any:
        return plain.decode(data, lambda _, parts: self.exports[parts[0]])

    def encode(self, value: Any) -> Any:
        """A value for the judge: data as data, objects as handles."""
        return plain.encode(value, self._export)

    def _export(self, value: Any) -> dict[str, Any]:
        self.exports.append(value)
        return {plain.OBJECT: [len(self.exports) - 1]}


def serve(payload: dict[str, Any], results: program.Results, descriptor: int) -> None:
    """Load the program, then answer the judge until it hangs up."""
    wire, failure, namespace = Wire(descriptor), None, {}
    try:
        namespace = program.load_to_ask(payload["program"])
    except BaseException as error:
        failure = program.describe(error)
    judged = JudgedProgram(namespace)
    wire.send({"ok": failure})
    while True:
        try:
            message = wire.receive()
        except (EOFError, OSError):
            return  # the judge has finished
        wire.send(judged.answer(message))
