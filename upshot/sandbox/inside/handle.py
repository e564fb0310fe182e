"""One of the program's objects as a test sees it: something to call, read and observe, never something to compare.

An operator of the program's own object would be the program's word for the test's question: `f(3) - 28.27` is what
`__sub__` says it is. So every operator but identity is refused, and a refusal fails the test whatever catches it. The
same holds for the methods of values (`startswith`, `find`, `issubset`) on anything but an instance the test made itself
by calling a class: where a test expects text, an object with a `startswith` of its own is not text.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn

from upshot.sandbox.inside.peer import Peer, Proxy
from upshot.sandbox.inside.plain import VALUE_METHODS

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

    def __len__(self) -> int:
        view = self._peer.view(self._number)
        if view.length is None:
            view.length = super().__len__()
            view.agree(self)
        return view.length

    def __iter__(self) -> Iterator[Any]:
        view = self._peer.view(self._number)
        if view.source is None:
            source = self._observe("iter")
            if type(source) is not Handle:
                self._refuse("iter()")
            if source._number == self._number:
                return _items(self)
            view.source = _items(source)
        return view.replay(self)

    def __next__(self) -> Any:
        pending = self._peer.pending.get(self._number)
        return pending.popleft() if pending else super().__next__()

    def __enter__(self) -> Any:
        return self._observe("enter")

    def __exit__(self, *_: object) -> None:
        """Leave; what a test raised inside stays raised, whatever the program would do with it."""
        self._observe("exit")

    def __getattr__(self, name: str) -> Any:
        if name == "_typ" or (name.startswith("__") and name not in DUNDERS):  # by _typ pandas knows its own
            raise AttributeError(name)
        if name in VALUE_METHODS and self._role != "made":
            self._refuse(f".{name}")
        return super().__getattr__(name)

    def __instancecheck__(self, value: Any) -> bool:
        if type(value) is Handle:
            return value._observe("isinstance", self) is True
        return hasattr(type(value), "_fields") and type(value).__name__ == self.__name__

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


class ObjectView:
    """What an object says it holds: the same every time, until the program is called again.

    Otherwise an object could have three items for `len` and none for the loop that checks them.
    """

    def __init__(self) -> None:
        self.length: int | None = None
        self.source: Iterator[Any] | None = None
        self.items: list[Any] = []
        self.whole = self.stale = False

    def replay(self, owner: Handle) -> Iterator[Any]:
        """The items from the first on."""
        for index in itertools.count():
            if index == len(self.items) and not self.whole:
                try:
                    self.items.append(next(self.source or iter(())))
                except StopIteration:
                    self.whole = True
            if index == len(self.items):
                self.agree(owner)
                return
            yield self.items[index]

    def agree(self, owner: Handle) -> None:
        """Refuse an object whose length is not that of what it holds."""
        if self.whole and not self.stale and self.length not in (None, len(self.items)):
            owner._refuse("len()")


def _items(handle: Handle) -> Iterator[Any]:
    """What an iterator of the program yields, some at a time; what is fetched and not used stays for `next`."""
    pending = handle._peer.pending.setdefault(handle._number, deque())
    most = 1
    while True:
        if not pending:
            pending.extend(handle._observe("take", most))
            most = min(2 * most, 256)
        if not pending:
            return
        yield pending.popleft()


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
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "and", "or", "xor", "lshift",
    "rshift",
)  # fmt: skip
_OTHERS = (
    "lt", "le", "gt", "ge", "hash", "abs", "neg", "pos", "invert", "int", "float", "complex", "index", "round", "trunc",
    "floor", "ceil", "bytes", "fspath", "copy", "deepcopy",
)  # fmt: skip
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *(f"i{name}" for name in _BINARY), *_OTHERS):
    setattr(Handle, f"__{_name}__", _refusal(f"__{_name}__"))
