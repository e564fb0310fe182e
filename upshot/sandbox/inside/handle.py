"""One of the program's objects as a test sees it, and what may be asked of it.

The program is hostile and answers every question as it likes. So an answer counts only as far as the program had to
know something to give it: data that the judge then compares with what the test expects, and that was not shown to the
program before. Three rules follow, and all of this file is made of them.

- **Nothing is compared over there.** `==`, `<`, `hash`, `float` and the like of an object would be the program's word
  for the test's question, `f(3) == 28.27`. They leave the test unconfirmed, whatever catches the exception.
- **An object that may stand where data is meant is asked nothing with an argument.** `f(3).startswith("28")` would show
  it what is wanted. What needs no argument (an attribute, `len`, `str`, a loop, `.total()`) may be asked of every
  object; with arguments only where data cannot be meant: of what the test names itself (a function, a class, a
  module), of what it made by calling a class, which it names with a capital letter, and of a function that a call
  returned. Never by an operator (`Ratio(1, 3) - 0.3333` shows it, too), nor by the name of a question that data answer
  (`PREDICATES`): a capital letter does not make a class.
- **Nothing is answered here in the program's place.** What Python itself would say of a handle (that it has no such
  attribute, cannot be inherited from, is no instance) is no word of the program's, and leaves the test unconfirmed.

How an object was come by is a matter of the path, not of the object (`Stack().add(1)` may return the stack itself):
every answer makes handles of its own. So identity means nothing here.
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


PREDICATES = frozenset(
    (
        "startswith", "endswith", "issubset", "issuperset", "isdisjoint", "count", "equals", "intersection", "union",
        "difference", "symmetric_difference",
    )
)  # fmt: skip
"""Methods of data that are asked with what a test expects."""


class Undecided(BaseException):
    """The test asked what no data can tell."""


class Questioner(Protocol):
    """Who asks for a handle: the judge."""

    def ask(self, op: str, target: int, name: str, args: Any = (), kwargs: Any = None) -> dict[str, Any]:
        """The program's answer."""

    def read(self, answer: dict[str, Any], path: str, word: str = "") -> Any:
        """The value of an answer."""

    def doubt(self, why: str) -> NoReturn:
        """Leave the test unconfirmed."""


class Handle:
    """An object of the program's."""

    __slots__ = ("_upshot_judge", "_upshot_kind", "_upshot_number", "_upshot_path", "_upshot_word")

    def __init__(self, judge: Questioner, number: int, kind: str, path: str, word: str = "") -> None:
        for name, value in zip(Handle.__slots__, (judge, kind, number, path, word), strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (args or kwargs) and self._upshot_path == PART:
            self._upshot_doubt("a call with arguments")
        made = MADE if self._upshot_path == NAMED and _is_class_name(self._upshot_word) else RETURNED
        return self._upshot_judge.read(self._upshot_judge.ask("call", self._upshot_number, "", args, kwargs), made)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_upshot_"):
            return object.__getattribute__(self, name)
        if name == "__class__" or (name.startswith("__") and name not in SPECIAL):
            self._upshot_doubt(name)  # `isinstance(handle, list)` looks there, too
        answer = self._upshot_judge.ask("get", self._upshot_number, name)
        if "method" in answer:
            return Method(self, name)
        return self._upshot_judge.read(
            answer, NAMED if self._upshot_path == NAMED and _is_class_name(name) else PART, name
        )

    def __setattr__(self, name: str, value: Any) -> None:
        self._upshot_judge.ask("set", self._upshot_number, name, [value])

    def _upshot_look(self, name: str, *args: Any) -> Any:
        """What Python's syntax does with the object, there; with arguments only where data cannot be meant."""
        if args and self._upshot_path != MADE:
            self._upshot_doubt(name)
        return self._upshot_judge.read(self._upshot_judge.ask("look", self._upshot_number, name, args), RETURNED)

    def _upshot_items(self) -> list[Any] | None:
        """All items of a container; None of an iterator."""
        items: list[Any] | None = self._upshot_look("items")
        if items is not None and len(items) > MOST_ITEMS:
            self._upshot_doubt(f"a loop over more than {MOST_ITEMS} items")
        return items

    def _upshot_agree(self, name: str) -> Any:
        """The length or truth of an object: where a list may be meant, that of the items which it gives."""
        answer = self._upshot_look(name)
        if self._upshot_path in (RETURNED, PART):
            try:
                items = self._upshot_items()
            except Exception:
                return answer  # it has none
            if items is None and name == "bool":
                return answer
            if items is None or answer != (len(items) if name == "len" else bool(items)):
                self._upshot_doubt(f"another {name} than items")
        return answer

    def __len__(self) -> int:
        return self._upshot_agree("len")

    def __iter__(self) -> Iterator[Any]:
        items = self._upshot_items()
        return self._upshot_take_all() if items is None else iter(items)

    def _upshot_take_all(self) -> Iterator[Any]:
        while items := self._upshot_look("take"):
            yield items[0]

    def __next__(self) -> Any:
        items = self._upshot_look("take")
        # StopIteration out of the program's hands would end our own loops: `all(map(lambda e: next(g) == e, …))`.
        return items[0] if items else self._upshot_doubt("the end of an iterator, by next()")

    def __bool__(self) -> bool:
        return self._upshot_agree("bool")

    def __str__(self) -> str:
        return self._upshot_look("str")

    def __repr__(self) -> str:
        return self._upshot_look("repr")

    def __format__(self, spec: str) -> str:
        return str(self) if not spec else self._upshot_doubt("format()")

    def __instancecheck__(self, value: Any) -> bool:
        return self._upshot_doubt("isinstance()")  # a class decides that as it likes

    def __eq__(self, other: object) -> bool:
        if other is not None:
            self._upshot_doubt("==")
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def _upshot_doubt(self, what: str) -> NoReturn:
        judge: Questioner = self._upshot_judge
        judge.doubt(f"{what} of the program's own {self._upshot_kind} object tells nothing that data would")


class Method:
    """Something to call by its name on an object; what it is called with, it is asked of the object."""

    __slots__ = ("_upshot_name", "_upshot_owner")

    def __init__(self, owner: Handle, name: str) -> None:
        self._upshot_owner, self._upshot_name = owner, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._upshot_owner
        asks = owner._upshot_path not in (NAMED, MADE) or self._upshot_name in PREDICATES
        if (args or kwargs) and asks:
            owner._upshot_doubt(f".{self._upshot_name}() with arguments")
        judge: Questioner = owner._upshot_judge
        return judge.read(judge.ask("call", owner._upshot_number, self._upshot_name, args, kwargs), RETURNED)

    def __getattr__(self, name: str) -> NoReturn:
        self._upshot_owner._upshot_doubt(f"an attribute of .{self._upshot_name}")

    def __bool__(self) -> bool:
        return self._upshot_owner._upshot_doubt(f"the truth of .{self._upshot_name}")

    def __eq__(self, other: object) -> bool:
        return self._upshot_owner._upshot_doubt(f".{self._upshot_name} beside another")

    __hash__ = None  # type: ignore[assignment]


def _is_class_name(word: str) -> bool:
    return word.lstrip("_")[:1].isupper()


def _refuse(name: str) -> Any:
    return lambda self, *_: self._upshot_doubt(name)


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_REFUSED = (
    *_BINARY, *(f"r{name}" for name in _BINARY), *(f"i{name}" for name in _BINARY),
    "lt", "le", "gt", "ge", "hash", "pos", "neg", "abs", "invert", "int", "float", "complex", "index", "round", "trunc",
    "floor", "ceil", "bytes", "fspath", "divmod", "await", "aiter", "reversed", "copy", "deepcopy", "reduce_ex",
    "contains", "delattr", "mro_entries", "set_name", "get", "class_getitem", "enter", "exit",
)  # fmt: skip
for _name in _REFUSED:
    setattr(Handle, f"__{_name}__", _refuse(f"__{_name}__"))
for _name in ("getitem", "setitem", "delitem"):
    setattr(Handle, f"__{_name}__", lambda self, *args, _name=_name: self._upshot_look(_name, *args))
