"""The judge: a clean process that runs the tests itself and reaches the program only by asking for data.

Builtins, libraries and what the row itself brings along are its own, never the program's. What comes back is data,
compared here, or a handle (`handle.py`). A test is confirmed where all it asserted was seen as data, and held. Anything
else leaves it unconfirmed. Whether that is the program's fault or the test's is not asked here: the row's reference was
judged in the same way (`tasks/verifiers/profile.py`).

Data is copied on its way. A program may change an argument in place, and a test may compare what it computes from its
own values with what the program made of them: `assert f(xs) == sorted(xs)` holds for whoever empties `xs`. So the test
keeps its arguments as they were. Only a look that `restores` takes over what the program changed (`sort(xs)`), and it
counts only for checks whose reference needs it.

What the program returned tells nothing any more once it is given back to it: `close(f(3), 28.27)` is its own word. So
the program is called only with arguments in which nothing can be its own, as the text of the test tells
(`evidence.mark_closed_calls`).
"""

from __future__ import annotations

import ast
import builtins
import collections
import sys
import time
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from upshot.sandbox.inside import cases, evidence, plain, program
from upshot.sandbox.inside.handle import NAMED, PART, RETURNED, Handle, Method, Undecided
from upshot.sandbox.inside.remote import Wire

CONTROL = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt)
"""Exceptions that steer loops and generators: one of the program's must not steer ours."""
CHANGING = ("take", "setitem", "delitem")
"""Looks after which an object may look different."""
MOST_PARTS = 2000
"""Parts of a value that are looked at."""
CLOSED = "_upshot_closed"
"""Stands around what a test calls with arguments in which nothing is the program's."""


class ProgramGone(BaseException):
    """The program's process ended, or sent what nobody can read."""


class ProgramJudge:
    """The judge's end of the wire."""

    def __init__(self, descriptor: int, restores: bool) -> None:
        self.wire = Wire(descriptor)
        self.restores = restores
        """Whether arguments that the program changes in place are changed here, too."""
        self.gone = ""
        """Why the program cannot be asked any more."""
        self.undecided = ""
        """Why the running test tells nothing."""
        self.asked = 0
        self.answers: dict[tuple[str, int, str], Any] = {}
        """What has been answered since anything could have changed: the same question is not asked twice."""
        self.closed = False
        """Whether the call under way is marked as one that is given nothing of the program's."""
        self.changed: list[Any] = []
        """Arguments of the running test that the program has changed in place."""
        self.empty = False
        """Whether the program has given the running test something with nothing in it."""
        self.building = False
        """Whether an exception of the program's is being made anew."""
        self.classes: dict[tuple[str, ...], type[BaseException]] = {}

    def begin_test(self) -> None:
        """Forget what belonged to the test before."""
        self.undecided, self.closed, self.empty, self.changed = "", False, False, []

    def doubt(self, why: str) -> NoReturn:
        """Leave the running test unconfirmed; no `except` in the test takes that back."""
        self.undecided = self.undecided or why
        raise Undecided(why)

    def ask(self, op: str, target: int, name: str, args: Sequence[Any] = (), kwargs: Any = None) -> dict[str, Any]:
        """Ask the program; its failure is raised here as the exception it was there."""
        values, closed = [*args, *(kwargs or {}).values()], self.closed
        self.closed = False
        if op == "call" and values:
            self._check_closed(values, closed)
        self.asked += 1
        changing = op in ("call", "set") or name in CHANGING
        if changing:
            self.answers.clear()
        elif not values and (op, target, name) in self.answers:
            return self.answers[op, target, name]
        message = {"op": op, "target": target, "name": name, "args": [self.lend(item) for item in args]}
        message["kwargs"] = {key: self.lend(item) for key, item in (kwargs or {}).items()}
        answer = self._exchange(message)
        for value, now in self._guard(lambda: [(values[index], after) for index, after in answer.get("changed", ())]):
            self._follow(value, now)
        if "error" in answer:
            raise self._guard(self._rebuild, answer["error"])
        if not changing and not values:
            self.answers[op, target, name] = answer
        return answer

    def _check_closed(self, values: Sequence[Any], closed: bool) -> None:
        """Doubt a call that may give the program what is of its own making."""
        changed = {id(value) for value in self.changed}
        if not closed or (self.restores and any(id(part) in changed for part in _list_parts(values))):
            self.doubt("the program may be given back what it gave")

    def _follow(self, value: Any, after: Any) -> None:
        """Take note that the program has changed an argument; make ours look like its own where that is wanted."""
        self.changed.append(value)
        if self.restores:
            self._guard(_restore, value, self._guard(self.decode, after, PART))
            self.empty = self.empty or _has_empty(value)

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        self._guard(self.wire.send, message)
        answer: dict[str, Any] = self._guard(self.wire.receive)
        if "unreadable" in answer:
            self.doubt(f"what the program gave cannot be carried ({str(answer['unreadable'])[:200]})")
        return answer

    def _guard(self, function: Any, *args: Any) -> Any:
        """Work on what the program sent: whatever goes wrong ends the conversation, and is no exception to expect."""
        if self.gone:
            raise ProgramGone(self.gone)
        try:
            return function(*args)
        except Exception as error:
            self.gone = f"{error}" if isinstance(error, EOFError) else f"unreadable message: {error!r}"[:300]
            raise ProgramGone(self.gone) from None

    def read(self, answer: dict[str, Any], path: str, word: str = "") -> Any:
        """The value of an answer."""
        value = self._guard(lambda: self.decode(answer["ok"], path, word))
        self.empty = self.empty or _has_empty(value)
        return value

    def decode(self, data: Any, path: str, word: str = "") -> Any:
        """A value from the program: data, or a handle by this path; what is inside of data is a part."""
        if _holds_type(data, path != RETURNED):
            self.doubt("a type is among what the program gave, which the test might call")
        outermost = isinstance(data, dict) and "o" in data
        return plain.decode(data, lambda number, kind: Handle(self, number, kind, path if outermost else PART, word))

    def lend(self, value: Any) -> Any:
        """A value for the program: data, and its own objects back."""
        return plain.encode(value, self._lend_object)

    def _lend_object(self, value: Any) -> dict[str, Any]:
        if type(value) is not Handle:
            self.doubt(f"the test gives the program a {type(value).__name__}, which is no data")
        return {"o": [value._upshot_number, value._upshot_kind]}

    def _rebuild(self, error: dict[str, Any]) -> BaseException:
        """The program's exception: a builtin one, or a class made for it here, with its name and bases."""
        text, args, state = str(error["text"]), self.decode(error["args"], PART), self.decode(error["state"], PART)
        kind = self.class_of([str(base) for base in error["bases"][:20]])
        self.building = True
        try:
            made = kind(*args)
            made = made if str(made) == text else kind(text)
        except TypeError:
            made = kind(text)
        finally:
            self.building = False
        made.__dict__.update({str(key): value for key, value in state.items()})
        made.__dict__["remote_tail"] = str(error["tail"])
        return made

    def class_of(self, bases: list[str]) -> type[BaseException]:
        """The exception class of these names, the nearest first."""
        known = getattr(builtins, bases[0], None)
        if isinstance(known, type) and issubclass(known, BaseException) and not issubclass(known, CONTROL):
            return known
        if tuple(bases) not in self.classes:
            own = {"__module__": evidence.MAIN, "_upshot_judge": self}
            made: Any = RemadeClass(bases[0], (self.class_of(bases[1:]),), own)
            self.classes[tuple(bases)] = made
        return self.classes[tuple(bases)]


class RemadeClass(type):
    """An exception class of the program's, by its name and bases alone."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Made for an exception that the program raised; not for a test."""
        judge: ProgramJudge = cls._upshot_judge  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs) if judge.building else judge.doubt("an exception class of the program")


def _holds_type(data: Any, outermost: bool) -> bool:
    if isinstance(data, dict):
        ((tag, body),) = data.items()
        return outermost if tag == "p" else _holds_type(body, True)
    return isinstance(data, list) and any(_holds_type(item, True) for item in data)


def _list_parts(values: Sequence[Any]) -> list[Any]:
    """Values and what plain containers among them hold."""
    waiting, found = list(values), list[Any]()
    while waiting and len(found) < MOST_PARTS:
        value = waiting.pop()
        found.append(value)
        if type(value) in (list, tuple, set, frozenset, collections.deque):
            waiting.extend(value)
        elif issubclass(type(value), dict):
            waiting.extend([*value, *value.values()])
    return found


def _has_empty(value: Any) -> bool:
    """Whether there is nothing in a value, or in some part of it: a list, an array, a range, but for texts."""
    return any(_is_empty(part) for part in _list_parts([value]))


def _is_empty(part: Any) -> bool:
    if type(part) in (str, bytes, type, Handle) or not hasattr(part, "__len__"):
        return False
    return part.size == 0 if hasattr(part, "shape") else len(part) == 0


def _restore(mine: Any, after: Any) -> None:
    """Make a value look like another of its type, in place; what cannot be done so is left as it is."""
    if type(mine) is not type(after) or type(mine) is Handle:
        return
    if type(mine) in (list, bytearray):
        mine[:] = after
    elif type(mine) in (dict, set, collections.deque):
        mine.clear()
        (mine.extend if isinstance(mine, collections.deque) else mine.update)(after)
    elif getattr(mine, "shape", None) == getattr(after, "shape", ()):
        mine[...] = after


def judge(payload: dict[str, Any], results: program.Results, descriptor: int) -> None:
    """Run the tests against the program at the other end and write what came of each."""
    trees = [cases.parse(test) for test in payload["tests"]]
    cases.prepare(payload["tests"])
    judge = ProgramJudge(descriptor, payload.get("restores", False))
    try:
        failure = judge._guard(lambda: judge.wire.receive()["ok"])
        if failure is not None:
            raise ProgramGone(f"it does not load this time: {failure}")
        court = Court(judge, payload["given"], [tree for tree in trees if isinstance(tree, ast.Module)])
        for index, tree in enumerate(trees):
            started = time.perf_counter()
            verdict = {"u": ""} if index in payload["skip"] or isinstance(tree, str) else court.verdict(tree)
            results.put({**verdict, "t": time.perf_counter() - started})
    except BaseException as error:  # it has gone, or answers even the question for its names with an exception
        results.put({"u": f"the program was not there to be asked: {error}"[:300]})


class Court:
    """The namespace tests share, and the verdict on each."""

    def __init__(self, judge: ProgramJudge, given: str, trees: Sequence[ast.Module]) -> None:
        self.judge = judge
        module = types.ModuleType(evidence.MAIN)
        sys.modules[evidence.MAIN] = module
        self.namespace = module.__dict__
        exec(compile(evidence.hold_given(given), "given.py", "exec", dont_inherit=True), self.namespace)
        self.held = {*self.namespace}
        """What the row brings along."""
        self.namespace[CLOSED] = self._call_closed
        self.vectorised = any(evidence.list_libraries(tree) & {"np", "numpy", "pytest"} for tree in trees)
        """Whether tests compare item by item, where nothing is equal to anything."""
        names = {name for tree in trees for name in evidence.list_names(tree)}
        self.data: set[str] = set()
        """Names of the program's that are data."""
        self._bind({name for name in names - self.namespace.keys() if not name.startswith("__")})

    def _bind(self, names: set[str]) -> None:
        """Bind those of the names that the program has; a builtin's is our own."""
        judge = self.judge
        answer = judge._exchange({"op": "names", "names": sorted(names)})
        for name, encoded, bases in judge._guard(lambda: [(n, v, b) for n, v, b in answer["ok"]]):
            if name not in names or hasattr(builtins, name):
                continue
            if bases is not None:
                value: Any = judge._guard(lambda bases=bases: judge.class_of([str(b) for b in bases[:20]]))
            else:
                value = judge.read({"ok": encoded}, NAMED, name)
            self.namespace[name] = value
            if type(value) is not Handle:
                self.data.add(name)

    def verdict(self, tree: ast.Module) -> dict[str, Any]:
        """What comes of one test: p(assed), u(nconfirmed); c: arguments changed."""
        judge, names, asked = self.judge, evidence.list_names(tree), self.judge.asked
        judge.begin_test()
        checked = cases.CheckCounter(lambda function: type(function) is Handle)
        failure: BaseException | None = None
        try:
            if reached := evidence.find_reach(tree):
                judge.doubt(f"it uses {reached}, which works on the process it is called in")
            cases.run(evidence.mark_closed_calls(tree, CLOSED, self.held), self.namespace, checked)
        except BaseException as error:
            failure = error
        if judge.gone:
            raise ProgramGone(judge.gone)
        why = judge.undecided
        if not why and judge.empty and self.vectorised:
            why = "nothing compares as equal to anything, item by item"
        if not why and failure is not None:
            why = f"raised only before the judge: {program.describe(failure)[1]}"[-program.TAIL_CHARS :]
        if not why and not checked.count:
            why = cases.NOTHING_CHECKED
        if not why and judge.asked == asked and not names & self.data:
            why = "it asks the program nothing"
        return ({"u": why} if why else {"p": True}) | ({"c": True} if judge.changed else {})

    def _call_closed(self, function: Any) -> Any:
        """What a test calls with nothing of the program's: nothing is given back by that."""
        if type(function) not in (Handle, Method):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            self.judge.closed = True
            return function(*args, **kwargs)

        return call
