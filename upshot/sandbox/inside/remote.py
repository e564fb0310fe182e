"""The untrusted program answering a judge: it sees calls and arguments, never the test that makes them."""

from __future__ import annotations

from typing import Any

from upshot.sandbox.inside import program
from upshot.sandbox.inside.peer import Peer, PeerGone, Proxy, mutable


class TestObject(Proxy):
    """An object of the test's in the program's hands: with operators, and attributes that are changed in place."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        peer, key = self._peer, (self._number, name)
        if key not in peer.lent:
            reply = peer.ask("get", target=self._number, name=name)
            value = peer.value(reply)
            if not mutable(value):
                return value
            peer.lent[key] = (reply["ok"], value)
        return peer.lent[key][1]

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.lent.pop((self._number, name), None)
        super().__setattr__(name, value)

    def __hash__(self) -> int:
        return hash(self._number)


def _operation(name: str) -> Any:
    return lambda self, *args: self._observe(name, *args)


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "contains"):
    setattr(TestObject, f"__{_name}__", _operation(_name))


class Program(Peer):
    """The loaded program as a peer."""

    def __init__(self, descriptor: int, namespace: dict[str, Any]) -> None:
        super().__init__(descriptor)
        self.namespace = namespace
        self.lent: dict[tuple[int, str], tuple[Any, Any]] = {}
        """Mutable attributes of the test's objects the program has read: as they came, and as they are."""

    def proxy(self, number: int, kind: str) -> Any:
        if number not in self.proxies:
            self.proxies[number] = TestObject(self, number, kind)
        return self.proxies[number]

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what the judge asks; what the program changed inside the test's objects goes back with the answer."""
        reply = super().answer(message)
        now = [(number, name, before, self.encode(value)) for (number, name), (before, value) in self.lent.items()]
        self.lent.clear()
        return {**reply, "lent": [[number, name, after] for number, name, before, after in now if after != before]}

    def perform(self, message: dict[str, Any]) -> dict[str, Any]:
        """Say what some names are here, or what any peer can."""
        if message["op"] != "names":
            return super().perform(message)
        found = [(name, self.namespace[name]) for name in message["names"] if name in self.namespace]
        return {"names": [[name, self.encode(value), _exception_bases(value)] for name, value in found]}


def _exception_bases(value: Any) -> list[str] | None:
    if not isinstance(value, type) or not issubclass(value, BaseException):
        return None
    return [base.__name__ for base in value.__mro__]


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
        peer.guarded(peer.wire.send, {"loaded": failure})
        while True:
            peer.guarded(peer.wire.send, peer.answer(peer.guarded(peer.wire.receive)))
    except PeerGone:
        return
