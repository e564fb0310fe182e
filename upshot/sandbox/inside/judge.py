"""The judge: a clean process that runs the tests itself and reaches the program only by asking for data.

Builtins, libraries and the row's own code run in the judge, never in the program. An answer is data, which is compared
here, or a handle to an object. A test is confirmed if everything that it asserted was seen as data, and held. Anything
else leaves it unconfirmed. The judge does not ask whether that is the program's fault or the test's: the row's
reference was judged in the same way (`tasks/verifiers/profile.py`). So no rules for unusual tests are needed.

The program is hostile and answers every question as it likes. So an answer counts only if the program had to know
something to give it. Three rules follow.

- **Nothing is compared in the program.** `==`, `<`, `in` or `float` of one of its objects would let the program itself
  answer the test's question, `f(3) == 28.27`. Nor does the judge answer in the program's place: that Python can neither
  add to a handle nor inherit from it says nothing about the object. Both leave the test unconfirmed.
- **An object that may stand for data gets no arguments.** `f(3).startswith("28")` would show the program the expected
  value. With arguments, a test may call a thing that it names itself (a function, a class, a module), the methods of an
  object that it made by calling a class (a name with a capital letter), and a function that a call returned. A capital
  letter does not make a class, so even there no question is asked that data would answer (`PREDICATES`).
- **The program is called only with arguments that cannot come from it**, as far as the text of the test shows
  (`evidence.mark_closed_calls`). A result that is passed back to the program proves nothing: in `close(f(3), 28.27)`
  the program judges itself.

Data is copied on its way, so the test's own arguments never change: `assert f(xs) == sorted(xs)` does not hold for a
program that empties `xs`. How a test got an object belongs to the path and not to the object (`Stack().add(1)` may
return the stack itself), so every answer makes new handles, and identity means nothing.
"""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import re
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from upshot.sandbox.inside import cases, evidence, plain, program
from upshot.sandbox.inside.remote import Wire

NAMED, MADE, RETURNED, PART = "named", "made", "returned", "part"
"""How a test got an object: by naming it, by making it, from a call, or inside another object."""
CONTROL = (StopIteration, StopAsyncIteration)
"""Exceptions that control loops: one raised by the program must not control ours."""
CLOSED = "_upshot_closed"
"""The marker around calls in whose arguments nothing belongs to the program."""
PREDICATES = frozenset(
    (
        "startswith", "endswith", "issubset", "issuperset", "isdisjoint", "count", "equals", "intersection", "union",
        "difference", "symmetric_difference",
    )
)  # fmt: skip
"""Methods of data whose arguments would show what a test expects."""


class Undecided(BaseException):
    """The test asked something that data cannot answer."""


class ProgramGone(BaseException):
    """The program's process ended, or sent something unreadable."""


class Handle:
    """An object of the program: it can be called and read; anything else leaves the test unconfirmed."""

    __slots__ = ("_upshot_judge", "_upshot_number", "_upshot_path", "_upshot_word")

    def __init__(self, judge: Judge, number: int, path: str, word: str) -> None:
        for name, value in zip(Handle.__slots__, (judge, number, path, word), strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._upshot_judge.call(self, "", *args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_upshot_"):
            return object.__getattribute__(self, name)
        # Special names would let the program answer protocols of Python and libraries: `isinstance` reads __class__.
        return self._upshot_doubt(name) if name.startswith("__") else self._upshot_judge.get(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._upshot_judge.set(self, name, value)

    def __eq__(self, other: object) -> bool:
        return False if other is None else self._upshot_doubt("==")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._upshot_ask_made("__iter__"))

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return self._upshot_judge.call(self, "__str__")

    def __repr__(self) -> str:
        return self._upshot_judge.call(self, "__repr__")

    def _upshot_ask_made(self, name: str, *args: Any) -> Any:
        """A special method, only for an object that the test made: the length of any other may be that of a list."""
        return self._upshot_judge.call(self, name, *args) if self._upshot_path == MADE else self._upshot_doubt(name)

    def _upshot_doubt(self, what: str, *_: Any) -> NoReturn:
        judge: Judge = self._upshot_judge
        judge.doubt(f"{what} of an object of the program's tells nothing that data would")


for _name in ("len", "getitem", "setitem", "delitem"):
    setattr(Handle, f"__{_name}__", functools.partialmethod(Handle._upshot_ask_made, f"__{_name}__"))
_NAN = re.compile(r"\b(?:\w*_|is)?nan(?:s|mean|sum|min|max|std|var|median)?(?:_\w*)?\b", re.IGNORECASE)
"""A word of a test that knows NaN: `nan`, `isnan`, `equal_nan`, `nanmean`; not `finance`."""
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_REFUSED = (
    *_BINARY, *(f"r{name}" for name in _BINARY), *(f"i{name}" for name in _BINARY),
    "lt", "le", "gt", "ge", "hash", "pos", "neg", "abs", "invert", "int", "float", "complex", "index", "round", "trunc",
    "floor", "ceil", "bytes", "fspath", "divmod", "await", "aiter", "reversed", "copy", "deepcopy", "reduce_ex",
    "contains", "delattr", "mro_entries", "set_name", "get", "class_getitem", "enter", "exit", "next", "instancecheck",
)  # fmt: skip
for _name in _REFUSED:
    setattr(Handle, f"__{_name}__", functools.partialmethod(Handle._upshot_doubt, f"__{_name}__"))


class Method(functools.partial[Any]):
    """Calls a method of an object by its name; any other use leaves the test unconfirmed."""

    def _doubt(self, *_: Any) -> NoReturn:
        judge: Judge = self.func.__self__  # type: ignore[attr-defined]
        judge.doubt("a method, where data may be meant")

    __bool__ = __eq__ = __getattr__ = _doubt  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class Items:
    """The items that an iterator of the program gave."""

    def __init__(self, judge: Judge, items: list[Any]) -> None:
        self.judge, self.left = judge, collections.deque(items)

    def __iter__(self) -> Iterator[Any]:
        while self.left:
            yield self.left.popleft()

    def __next__(self) -> Any:
        # A StopIteration that the program chooses would end our own loops: `all(map(lambda e: next(g) == e, …))`.
        return self.left.popleft() if self.left else self.judge.doubt("the end of an iterator, by next()")


class Judge:
    """The namespace that tests share, the connection to the program, and the verdict on each test."""

    def __init__(self, wire: Wire, given: str, trees: Sequence[ast.Module]) -> None:
        self.wire = wire
        self.gone = ""
        """Why the program cannot be called any more."""
        self.undecided = ""
        """Why the running test is not confirmed."""
        self.asked = 0
        self.attributes: dict[tuple[int, str], Any] = {}
        """Values read since the last call or assignment: reading does not change an object."""
        self.closed = False
        """Whether the current call is marked: nothing in its arguments belongs to the program."""
        self.vague: set[str] = set()
        """What the program has given the running test that may hold whatever is asked: 'empty', 'nan'."""
        if (failure := self.wire.receive()["ok"]) is not None:
            raise ProgramGone(f"it did not load this time: {failure}")
        module = types.ModuleType(evidence.MAIN)
        sys.modules[evidence.MAIN] = module
        self.namespace = module.__dict__
        exec(compile(evidence.hold_given(given), "given.py", "exec", dont_inherit=True), self.namespace)
        self.held = {*self.namespace}
        """Names defined by the row's own code."""
        self.namespace[CLOSED] = self._mark_closed
        # Tests that compare item by item, so that an empty value equals anything.
        self.vectorised = any(evidence.list_words(tree) & {"np", "numpy", "pytest"} for tree in trees)
        named = {name for tree in trees for name in evidence.list_names(tree)} - self.namespace.keys()
        self.data: set[str] = set()
        """Names of the program that are data."""
        self.wire.send({"op": "names", "names": sorted(named)})
        for name, value in self.wire.receive()["ok"]:
            if name in named and not name.startswith("__") and not hasattr(builtins, name):
                self.namespace[name] = self.decode(value, NAMED, name)
                if not isinstance(self.namespace[name], Handle):
                    self.data.add(name)

    def verdict(self, tree: ast.Module) -> dict[str, Any]:
        """The result of one test: p(assed) or u(nconfirmed)."""
        names, asked = evidence.list_names(tree), self.asked
        self.undecided, self.closed, self.vague = "", False, set()
        checked = cases.CheckCounter(lambda function: isinstance(function, Handle | Method))
        failure = ""
        try:
            if reached := evidence.list_words(tree) & evidence.REACHING:
                self.doubt(f"it uses {min(reached)}, which works on the process it is called in")
            cases.run(evidence.mark_closed_calls(tree, CLOSED, self.held), self.namespace, checked)
        except BaseException as error:
            failure = f"raised only before the judge: {program.describe(error)[1]}"[-program.TAIL_CHARS :]
        if self.gone:
            raise ProgramGone(self.gone)
        doubts = (
            self.undecided,
            failure,
            "nothing compares as equal to anything, item by item" if "empty" in self.vague and self.vectorised else "",
            "NaN is not above any limit" if "nan" in self.vague and not _NAN.search(ast.unparse(tree)) else "",
            "" if checked.count else cases.NOTHING_CHECKED,
            "it asks the program nothing" if self.asked == asked and not names & self.data else "",
        )
        why = next(filter(None, doubts), "")
        return {"u": why} if why else {"p": True}

    def doubt(self, why: str) -> NoReturn:
        """Leave the running test unconfirmed; no `except` in the test can undo this."""
        self.undecided = self.undecided or why
        raise Undecided(why)

    def call(self, handle: Handle, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an object, or its method of that name."""
        closed, self.closed, path = self.closed, False, handle._upshot_path
        if args or kwargs:
            if name in PREDICATES or path == PART or (name and path == RETURNED):
                self.doubt(f"a call with arguments of what may stand for data ({name or 'an object'})")
            if not closed and not name.startswith("__"):
                self.doubt("the program may be given back what it gave")
        self.attributes.clear()
        made = MADE if path == NAMED and not name and is_class_name(handle._upshot_word) else RETURNED
        answer = self.ask("call", handle, name, args, kwargs)
        return self._guard(lambda: self.decode(answer["ok"], made))

    def get(self, handle: Handle, name: str) -> Any:
        """An attribute: data, an object, or a function that calls the method of that name."""
        key = handle._upshot_number, name
        inner = NAMED if handle._upshot_path == NAMED and is_class_name(name) else PART
        answer = self.attributes[key] if key in self.attributes else self.ask("get", handle, name)
        self.attributes[key] = answer
        if "method" in answer:
            return Method(self.call, handle, name)
        return self._guard(lambda: self.decode(answer["ok"], inner, name))

    def set(self, handle: Handle, name: str, value: Any) -> None:
        """Set an attribute."""
        self.attributes.clear()
        self.ask("set", handle, name, [value])

    def ask(
        self, op: str, handle: Handle, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The program's answer; an exception there is raised here as the same exception."""
        self.asked += 1
        lent = [self._lend(item) for item in args]
        named = {key: self._lend(item) for key, item in (kwargs or {}).items()}
        message = {"op": op, "target": handle._upshot_number, "name": name, "args": lent, "kwargs": named}
        self._guard(self.wire.send, message)
        answer = self._guard(self.wire.receive)
        if "unreadable" in answer:
            self.doubt(f"what the program gave cannot be carried ({str(answer['unreadable'])[:200]})")
        if "error" in answer:
            raise self._guard(self._rebuild, answer["error"])
        return answer

    def _guard(self, work: Callable[..., Any], *args: Any) -> Any:
        """Inside, the program's message is processed: any failure ends the conversation, and no test may expect it."""
        if self.gone:
            raise ProgramGone(self.gone)
        try:
            return work(*args)
        except Exception as error:
            self.gone = f"{error}" if isinstance(error, EOFError) else f"unreadable message: {error!r}"[:300]
            raise ProgramGone(self.gone) from None

    def decode(self, data: Any, path: str, word: str = "") -> Any:
        """A value from the program: data, or a handle with this path; an object inside data is a part."""
        self.vague |= find_vague(data)
        outermost = isinstance(data, dict) and plain.OBJECT in data

        def foreign(tag: str, parts: list[Any]) -> Any:
            if tag == plain.ITERATOR:
                return Items(self, parts)
            return Handle(self, int(parts[0]), path if outermost else PART, word)

        return plain.decode(data, foreign)

    def _lend(self, value: Any) -> Any:
        """A value for the program: data, and its own objects back."""

        def foreign(item: Any) -> dict[str, Any]:
            if type(item) is not Handle:
                self.doubt(f"the test gives the program a {type(item).__name__}, which is not data")
            return {plain.OBJECT: [item._upshot_number]}

        return plain.encode(value, foreign)

    def _rebuild(self, error: dict[str, Any]) -> BaseException:
        """The program's exception, as an instance of the nearest builtin class."""
        known = [getattr(builtins, str(name), None) for name in error["bases"][:20]]
        kinds = [kind for kind in known if isinstance(kind, type) and issubclass(kind, Exception)]
        if not kinds:
            self.doubt(f"the program raised {str(error['bases'][0])[:100]}")
        kind = next(kind for kind in kinds if not issubclass(kind, CONTROL))
        made = kind(*self.decode(error["args"], PART))
        return made if str(made) == str(error["text"]) else kind(str(error["text"]))

    def _mark_closed(self, function: Any) -> Any:
        """Make a marked call: nothing of the program is passed back to it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.closed = True
            return function(*args, **kwargs)

        return call if isinstance(function, Handle | Method) else function


def is_class_name(word: str) -> bool:
    """Whether this name in a test seems to be a class, because it has a capital letter."""
    return word.lstrip("_")[:1].isupper()


def find_vague(data: Any) -> set[str]:
    """'empty' and 'nan', if the data or some part of it is: an empty list, array or range, but not a text."""
    waiting, found = [data], set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict | list):
            found |= set() if part else {"empty"}
            waiting += part.values() if isinstance(part, dict) else part
        elif part != part:
            found.add("nan")
    return found


def judge(payload: dict[str, Any], results: program.Results, descriptor: int) -> None:
    """Run the tests against the program at the other end, and write the result of each."""
    trees = [cases.parse(test) for test in payload["tests"]]
    cases.prepare(payload["tests"])
    try:
        court = Judge(Wire(descriptor), payload["given"], [tree for tree in trees if isinstance(tree, ast.Module)])
        for index, tree in enumerate(trees):
            started = time.perf_counter()
            verdict = {"u": ""} if index in payload["skip"] or isinstance(tree, str) else court.verdict(tree)
            results.put({**verdict, "t": time.perf_counter() - started})
    except BaseException as error:  # it has ended, or even the request for its names raises
        results.put({"u": f"the program was not there to be asked: {error}"[:300]})
