"""One of the program's objects as a test sees it: something to call, read and observe, never something to compare.

An operator of the program's own object would be the program's word for the test's question: `f(3) - 28.27` is what
`__sub__` says it is. So every operator but identity is refused, and a refusal fails the test whatever catches it. The
same holds for the methods of values (`startswith`, `find`, `issubset`) on anything but an instance the test made itself
by calling a class: where a test expects text, an object with a `startswith` of its own is not text.
"""

from __future__ import annotations

from typing import Any, NoReturn

from upshot.sandbox.inside.peer import Peer
from upshot.sandbox.inside.plain import VALUE_METHODS
from upshot.sandbox.inside.proxy import Proxy

DUNDERS = frozenset(("__name__", "__qualname__", "__doc__", "__dict__", "__annotations__", "__wrapped__"))
"""Special attributes a test may read; others would let the program answer protocols of libraries in the judge."""


class NotEvidence(BaseException):
    """The test asked the program's own object what only data can tell."""


class Handle(Proxy):
    """An object of the program's."""

    __slots__ = ("_role",)

    def __init__(self, peer: Peer, number: int, kind: str, role: str = "") -> None:
        super().__init__(peer, number, kind)
        object.__setattr__(self, "_role", role)
        """'class': a test names it with a capital letter. 'made': the test made it by calling such a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = super().__call__(*args, **kwargs)
        return in_role(found, "made") if self._role == "class" and type(found) is Handle else found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in DUNDERS:
            raise AttributeError(name)
        if name in VALUE_METHODS and self._role != "made":
            self._refuse(f".{name}")
        return super().__getattr__(name)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Handle and value._observe("isinstance", self) is True

    def __eq__(self, other: object) -> bool:
        return self is other if self is other or other is None else self._refuse("==")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __format__(self, spec: str) -> str:
        return str(self) if not spec else self._refuse("__format__")

    def _refuse(self, what: str) -> NoReturn:
        peer: Any = self._peer
        peer.refused = (
            peer.refused or f"{what} of the program's own {self._kind} object is no evidence; a test needs data"
        )
        raise NotEvidence(peer.refused)


def in_role(handle: Handle, role: str) -> Handle:
    """The same object by another way of coming to it; the same handle every time."""
    peer: Any = handle._peer
    key = (handle._number, role)
    return peer.proxies.setdefault(key, Handle(peer, handle._number, handle._kind, role))


def _refusal(name: str) -> Any:
    def refuse(self: Handle, *_: Any) -> NoReturn:
        self._refuse(name)

    return refuse


_BINARY = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "divmod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
_OTHERS = (
    "lt", "le", "gt", "ge", "hash", "abs", "neg", "pos", "invert", "int", "float", "complex", "index", "round", "trunc",
    "floor", "ceil", "bytes", "fspath", "copy", "deepcopy",
)  # fmt: skip
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *(f"i{name}" for name in _BINARY), *_OTHERS):
    setattr(Handle, f"__{_name}__", _refusal(f"__{_name}__"))
