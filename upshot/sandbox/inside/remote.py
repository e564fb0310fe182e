"""The untrusted program answering a judge: it sees calls and arguments, never the test that makes them."""

from __future__ import annotations

import operator
from typing import Any

from upshot.sandbox.inside import program
from upshot.sandbox.inside.peer import Peer, PeerGone

MAX_ITEMS = 1_000_000


class Callback:
    """A function of the judge's, as the program sees it."""

    def __init__(self, peer: Peer, handle: int) -> None:
        self._peer = peer
        self._handle = handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        message = {
            "op": "call",
            "target": self._handle,
            "args": [self._peer.encode(item) for item in args],
            "kwargs": {name: self._peer.encode(item) for name, item in kwargs.items()},
        }
        reply = self._peer.request(message)
        if "error" in reply:
            raise RuntimeError(str(reply["error"]))
        return self._peer.decode(reply["ok"])


class Program(Peer):
    """The loaded program as a peer."""

    def __init__(self, descriptor: int, namespace: dict[str, Any]) -> None:
        super().__init__(descriptor)
        self.namespace = namespace

    def proxy(self, handle: int, kind: str) -> Any:
        return Callback(self, handle)

    def handle_of(self, value: Any) -> int | None:
        return value._handle if type(value) is Callback else None

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return getattr(self, "do_" + message["op"])(message)
        except PeerGone:
            raise
        except BaseException as error:
            bases = [base.__name__ for base in type(error).__mro__]
            name, tail = program.describe(error)
            try:
                text = str(error)[:500]
            except BaseException:
                text = ""
            return {"error": [name, bases, text, tail]}

    def do_names(self, message: dict[str, Any]) -> dict[str, Any]:
        """What each of these names is in the program."""
        found = {}
        for name in message["names"]:
            if name in self.namespace:
                value = self.namespace[name]
                raises = isinstance(value, type) and issubclass(value, BaseException)
                bases = [base.__name__ for base in value.__mro__] if raises else None
                found[name] = {"value": self.encode(value), "bases": bases}
        return {"ok": found}

    def do_call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Call one of the program's objects."""
        return self.call(self.exports[message["target"]], message["args"], message["kwargs"])

    def do_get(self, message: dict[str, Any]) -> dict[str, Any]:
        """An attribute of one of the program's objects."""
        return {"ok": self.encode(getattr(self.exports[message["target"]], message["name"]))}

    def do_set(self, message: dict[str, Any]) -> dict[str, Any]:
        """Set an attribute of one of the program's objects."""
        setattr(self.exports[message["target"]], message["name"], self.decode(message["value"]))
        return {"ok": None}

    def do_list(self, message: dict[str, Any]) -> dict[str, Any]:
        """Everything an iterable of the program yields."""
        items = []
        for item in self.exports[message["target"]]:
            items.append(self.encode(item))
            if len(items) > MAX_ITEMS:
                raise ValueError(f"an iterable of more than {MAX_ITEMS} items")
        return {"ok": items}

    def do_operate(self, message: dict[str, Any]) -> dict[str, Any]:
        """Apply an operator or a one-argument builtin to objects of the program."""
        function = getattr(operator, message["name"], None) or _BUILTINS[message["name"]]
        return {"ok": self.encode(function(*[self.decode(item) for item in message["args"]]))}


_BUILTINS: dict[str, Any] = {
    "len": len,
    "str": str,
    "repr": repr,
    "bool": bool,
    "next": next,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "type": lambda value: type(value).__name__,
    "int": int,
    "float": float,
    "hash": hash,
}


def serve(payload: dict[str, Any], results: program.Results, descriptor: int) -> None:
    """Load the program, then answer the judge until it hangs up."""
    failure = None
    namespace: dict[str, Any] = {}
    try:
        namespace = program.load(payload["program"], "program")
    except BaseException as error:
        failure = program.describe(error)
    peer = Program(descriptor, namespace)
    try:
        peer.wire.send({"loaded": failure})
        while True:
            message = peer.wire.receive()
            peer.wire.send(peer.handle(message))
    except PeerGone:
        return
