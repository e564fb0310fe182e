"""The untrusted program answering a judge: it sees calls and arguments, never the test that makes them."""

from __future__ import annotations

from typing import Any

from upshot.sandbox.inside import program
from upshot.sandbox.inside.peer import Peer, PeerGone


class Program(Peer):
    """The loaded program as a peer."""

    def __init__(self, descriptor: int, namespace: dict[str, Any]) -> None:
        super().__init__(descriptor)
        self.namespace = namespace

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
