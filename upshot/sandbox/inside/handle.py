"""One of the program's objects as a test sees it, and what may be asked of it.

The program is hostile and answers every question as it likes. So an answer counts only as far as the program had to
know something to give it: data that the judge then compares with what the test expects, and that was not shown to the
program before. Two rules follow, and all of this file is made of them.

- **Nothing is compared over there.** `==`, `<`, `hash`, `float` and the like of an object would be the program's word
  for the test's question, `f(3) == 28.27`. They leave the test undecided, whatever catches the exception.
- **An object that may stand where data is meant is asked nothing with an argument.** `f(3).startswith("28")` would show
  it what is wanted. What needs no argument (an attribute, `len`, `str`, a loop, `.total()`) may be asked of every
  object; with arguments only where data cannot be meant: of what the test names itself (a function, a class, a
  module), of what it made by calling a class, which it names with a capital letter, and of a function that a call
  returned.

How an object was come by is a matter of the path, not of the object (`Stack().add(1)` may return the stack itself):
every answer makes handles of its own. So identity means nothing here; tests that ask for it are told by their text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

MOST_ITEMS = 10_000
"""Of an object that is iterated over: beyond that the test is not decided."""
NAMED, MADE, RETURNED, PART = "named", "made", "returned", "part"
"""How a test came by an object: it names it, made it, was given it by a call, or found it in another one."""
SPECIAL = frozenset(("__name__", "__qualname__", "__doc__", "__dict__", "__annotations__"))
"""Special attributes that are read; others would let the program answer protocols of libraries in the judge."""


class Undecided(BaseException):
    """The test asked what no data can tell."""


class Questioner(Protocol):
    """Who asks for a handle: the judge."""

    def ask(self, op: str, target: int, name: str, args: Any = (), kwargs: Any = None) -> dict[str, Any]:
        """The program's answer."""

    def read(self, answer: dict[str, Any], path: str, word: str = "") -> Any:
        """The value of an answer."""

    def agree_on_size(self, number: int, size: int | None) -> None:
        """Doubt an object with another length than items."""

    def doubt(self, why: str) -> NoReturn:
        """Leave the test undecided."""


class Handle:
    """An object of the program's."""

    __slots__ = ("_judge", "_kind", "_number", "_path", "_word")

    def __init__(self, judge: Questioner, number: int, kind: str, path: str, word: str = "") -> None:
        own = {"_judge": judge, "_number": number, "_kind": kind, "_path": path, "_word": word}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (args or kwargs) and self._path == PART:
            self._doubt("a call with arguments")
        made = MADE if self._path == NAMED and _is_class_name(self._word) else RETURNED
        return self._judge.read(self._judge.ask("call", self._number, "", args, kwargs), made)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in SPECIAL:
            raise AttributeError(name)
        answer = self._judge.ask("get", self._number, name)
        if "method" in answer:
            return Method(self, name)
        return self._judge.read(answer, NAMED if self._path == NAMED and _is_class_name(name) else PART, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._judge.ask("set", self._number, name, [value])

    def _look(self, name: str, *args: Any) -> Any:
        """What Python's syntax does with the object, there; with arguments only where data cannot be meant."""
        if args and self._path != MADE:
            self._doubt(name)
        return self._judge.read(self._judge.ask("look", self._number, name, args), RETURNED)

    def __len__(self) -> int:
        size = self._look("len")
        self._judge.agree_on_size(self._number, size)
        return size

    def __iter__(self) -> Iterator[Any]:
        items = self._look("items")
        if items is None:
            self._judge.agree_on_size(self._number, None)
            return self._take_all()
        if len(items) > MOST_ITEMS:
            self._doubt(f"a loop over more than {MOST_ITEMS} items")
        self._judge.agree_on_size(self._number, len(items))
        return iter(items)

    def _take_all(self) -> Iterator[Any]:
        while items := self._look("take"):
            yield items[0]

    def __next__(self) -> Any:
        items = self._look("take")
        # StopIteration out of the program's hands would end our own loops: `all(map(lambda e: next(g) == e, …))`.
        return items[0] if items else self._doubt("the end of an iterator, by next()")

    def __bool__(self) -> bool:
        return self._look("bool")

    def __str__(self) -> str:
        return self._look("str")

    def __repr__(self) -> str:
        return self._look("repr")

    def __format__(self, spec: str) -> str:
        return str(self) if not spec else self._doubt("format()")

    def __enter__(self) -> Any:
        return self._look("enter")

    def __exit__(self, *_: object) -> None:
        """Leave; what a test raised inside stays raised, whatever the program would do with it."""
        self._look("exit")

    def __instancecheck__(self, value: Any) -> bool:
        if type(value).__module__ == "builtins":
            return False  # data: no class of the program's makes an exact int or list
        if type(value) is not Handle:
            self._doubt("isinstance() of data")  # a namedtuple, made anew here
        return self._judge.read(self._judge.ask("look", value._number, "isinstance", [self]), PART)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Every `isinstance(handle, list)` looks here, wherever it is called: the handle's own class is no answer."""
        return self._doubt("the class")

    def __eq__(self, other: object) -> bool:
        return self is other if self is other or other is None else self._doubt("==")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def _doubt(self, what: str) -> NoReturn:
        judge: Questioner = self._judge
        judge.doubt(f"{what} of the program's own {self._kind} object tells nothing that data would")


class Method:
    """Something to call by its name on an object; what it is called with, it is asked of the object."""

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Handle, name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner
        if (args or kwargs) and owner._path not in (NAMED, MADE):
            owner._doubt(f".{self._name}() with arguments")
        return owner._judge.read(owner._judge.ask("call", owner._number, self._name, args, kwargs), RETURNED)

    def __getattr__(self, name: str) -> NoReturn:
        self._owner._doubt(f"an attribute of .{self._name}")


def _is_class_name(word: str) -> bool:
    return word.lstrip("_")[:1].isupper()


def _refuse(name: str) -> Any:
    return lambda self, *_: self._doubt(name)


def _compute(name: str) -> Any:
    """An operator of an object the test made: another object comes of it, or data of objects alone."""

    def operate(self: Handle, *others: Any) -> Any:
        found = self._look(name, *others)
        shown = any(type(other) is not Handle for other in others)
        return found if type(found) is Handle or not shown else self._doubt(name)

    return operate


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_OTHERS = (
    "lt", "le", "gt", "ge", "hash", "pos", "invert", "int", "float", "complex", "index", "round", "trunc",
    "floor", "ceil", "bytes", "fspath", "divmod", "await", "aiter", "reversed", "copy", "deepcopy", "reduce_ex",
)  # fmt: skip
for _name in (*_OTHERS, *(f"r{name}" for name in _BINARY), *(f"i{name}" for name in _BINARY), "lshift", "rshift"):
    setattr(Handle, f"__{_name}__", _refuse(f"__{_name}__"))
for _name in (*_BINARY[:-2], "neg", "abs"):
    setattr(Handle, f"__{_name}__", _compute(f"{_name}_" if _name in ("and", "or") else _name))
for _name in ("contains", "getitem", "setitem", "delitem"):
    setattr(Handle, f"__{_name}__", lambda self, *args, _name=_name: self._look(_name, *args))
