"""The judge: a clean process that runs the tests itself and reaches the program only by asking for data.

Builtins, libraries and what the row itself brings along are its own, never the program's. What comes back is data,
compared here, or a handle (`handle.py`). A test ends in one of three ways. All it asserted was seen as data, and held:
it is passed. An assert failed where nothing but plain data was exchanged (`simple`): the program is not what it
pretended to be when it passed plainly. Anything else is undecided, a failure that our standing in for the program may
have made among it, and so is everything that copies cannot tell: data is copied on its way, so a test that changes what
went to the program or came from it, or that depends on a global the program changes, would see another world than the
program does. Such changes are looked for before every question (`_check_copies`) and at the end of every test; changes
that the program makes to what the test holds come with its answers, and are made here, too (`_renew`).

What the program returned tells nothing any more once it is given back to it: `close(f(3), 28.27)` is its own word. The
text of a test tells which calls are given nothing that could be the program's (`evidence.mark_closed_calls`); others
leave the test undecided once the program has given something (`_check_fed`).
"""

from __future__ import annotations

import ast
import builtins
import collections
import importlib
import sys
import time
import types
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from upshot.sandbox.inside import cases, evidence, plain, program
from upshot.sandbox.inside.handle import NAMED, PART, RETURNED, Handle, Method, Undecided
from upshot.sandbox.inside.remote import Wire

CONTROL = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt)
"""Exceptions that steer loops and generators: one of the program's must not steer ours."""
CHANGING = ("take", "setitem", "delitem", "enter", "exit")
"""Looks after which an object may look otherwise."""
MOST_PARTS = 2000
"""Of arguments, in which results are looked for."""
STALE = object()
"""How a copy looks that the program has changed and that could not be changed here."""
CONTAINERS = (list, dict, set, collections.deque)
"""What changes in place and can be made to look otherwise in place."""


CLOSED = "_upshot_closed"
"""Stands around what a test calls with arguments in which nothing is the program's."""
PLAIN_TAGS = frozenset("itdb")
"""Of data that is the same wherever it is: numbers, texts, lists, tuples, dictionaries; a set has its own order."""


class ProgramGone(BaseException):
    """The program's process ended, or sent what nobody can read."""


class ProgramJudge:
    """The judge's end of the wire."""

    def __init__(self, descriptor: int) -> None:
        self.wire = Wire(descriptor)
        self.gone = ""
        """Why the program cannot be asked any more."""
        self.undecided = ""
        """Why the running test tells nothing."""
        self.asked = 0
        self.copied = 0
        self.copies: dict[int, tuple[Any, Any]] = {}
        """By the number of the copy, ours of what the program has, too, and how it looked when they were the same."""
        self.answers: dict[tuple[str, int, str], Any] = {}
        """What has been answered since anything could have changed: the same question has the same answer."""
        self.sizes: dict[int, int | None] = {}
        self.truths: dict[int, bool] = {}
        self.simple = True
        """Whether the running test has exchanged nothing but plain data with functions and methods."""
        self.heard = False
        """Whether the program has given the running test something."""
        self.shares = False
        """Whether methods of a case can hold what others were given."""
        self.changed: set[int] = set()
        """Numbers of copies that the program has changed."""
        self.empty = False
        """Whether the program has given the running test something with nothing in it."""
        self.closed = False
        """Whether the call under way is marked as one that is given nothing of the program's,"""
        self.literal = False
        """or nothing but literals."""
        self.building = False
        """Whether an exception of the program's is made anew."""
        self.classes: dict[tuple[str, ...], type[BaseException]] = {}

    def begin_test(self) -> None:
        """Forget what belonged to the test before."""
        self.undecided, self.simple, self.closed, self.literal, self.empty = "", True, False, False, False
        self.truths.clear()

    def forget_fed(self) -> None:
        """A method of a case begins, which holds nothing of what others were given, unless they share something."""
        if self.shares:
            return
        self.heard = False
        self.changed.clear()

    def doubt(self, why: str) -> NoReturn:
        """Leave the running test undecided; no `except` of the test's takes that back."""
        self.undecided = self.undecided or why
        raise Undecided(why)

    def ask(self, op: str, target: int, name: str, args: Sequence[Any] = (), kwargs: Any = None) -> dict[str, Any]:
        """Ask the program; its failure is raised here as the exception it was there."""
        self._check_copies()
        if op == "call" and (args or kwargs):
            self._check_fed([*args, *(kwargs or {}).values()])
        self.simple = self.simple and op == "call" and not name and self.literal
        self.closed = self.literal = False
        self.asked += 1
        changing = op in ("call", "set") or name in CHANGING
        if changing:
            self.answers.clear()
            touched = {target, *(one._upshot_number for one in args if type(one) is Handle)}
            for number in touched:
                self.sizes.pop(number, None)
                self.truths.pop(number, None)
        message = {"op": op, "target": target, "name": name, "held": list(self.copies)}
        message["args"] = [self._give(item) for item in args]
        message["kwargs"] = {key: self._give(item) for key, item in (kwargs or {}).items()}
        answer = self._exchange(message)
        if "error" in answer:
            self.simple, self.heard = False, True
            raise self._guard(self._rebuild, answer["error"])
        self.copied += plain.is_copied(answer.get("ok"))  # whatever comes of it here: the program has counted it
        if not changing and not args and self.answers.setdefault((op, target, name), answer) != answer:
            self.doubt(f"the program answered the same question ({name}) in two ways")
        return answer

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        self._guard(self.wire.send, message)
        answer = self._guard(self.wire.receive)
        if "unreadable" in answer:
            self.doubt(f"what the program gave cannot be carried ({str(answer['unreadable'])[:200]})")
        for number, after in self._guard(lambda: dict(answer.pop("changed"))).items():
            self.simple = False
            if number in self.copies:
                self._renew(number, self._guard(self.decode, after, PART))
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

    def read(self, answer: dict[str, Any], path: str, word: str = "", number: int = 0) -> Any:
        """The value of the answer just given, or of an earlier one whose copy has that number."""
        value = self._guard(lambda: self.decode(answer["ok"], path, word))
        self.simple = self.simple and path == RETURNED and _is_plain(answer["ok"])
        if plain.is_copied(answer["ok"]):
            self.copies[number or self.copied] = (value, self.lend(value))
        self.empty = self.empty or _is_empty(answer["ok"])
        self.heard = self.heard or (path != NAMED and type(value) is not Handle) or path in (RETURNED, PART)
        return value

    def _check_fed(self, given: Sequence[Any]) -> None:
        """Doubt a test that gives the program what may be of its own making, once it has given something."""
        changed = {id(value) for number, (value, _) in self.copies.items() if number in self.changed}
        if (self.heard and not self.closed) or any(id(part) in changed for part in _list_parts(given)):
            self.doubt("the program may be given back what it gave")

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

    def _give(self, value: Any) -> Any:
        """An argument; of one that is copied we remember how it looked."""
        data = self.lend(value)
        if plain.is_copied(data):
            self.copied += 1
            self.copies[self.copied] = (value, data)
        return data

    def _check_copies(self) -> None:
        """Doubt the test if it has changed a copy, and forget the copies that it no longer holds.

        The program has its own of a copy, which knows nothing of the change: were they one object, as they are plainly,
        the next answer would be another one. Copies dropped after a change count, too: `order.items.append(3)`.
        """
        held = {number for number, entry in self.copies.items() if _is_held(entry)}
        for number, (value, before) in self.copies.items():
            if before is STALE and number in held:
                self.doubt("the program changes in place what the test holds, or a part of it")
            if before is not STALE and self.lend(value) != before:
                self.doubt("the test changes in place what went to the program or came from it")
        self.copies = {number: entry for number, entry in self.copies.items() if number in held}

    def check_rest(self) -> None:
        """At the end of a test: a change of the only copy that it holds was seen by all that could see it."""
        before = self.undecided
        self.simple = self.simple and all(
            mark is not STALE and self.lend(v) == mark for v, mark in self.copies.values()
        )
        try:
            self._check_copies()
        except Undecided:
            held = [entry for entry in self.copies.values() if _is_held(entry)]
            if len(held) > 1 or any(before is STALE for _, before in held):
                raise
            self.undecided = before  # an earlier doubt stays

    def _renew(self, number: int, after: Any) -> None:
        """Make our copy look as the program's own does now; stale where that cannot be done in place."""
        mine, _ = self.copies[number]
        if type(mine) is not type(after) or type(mine) not in CONTAINERS or _are_parts_held(mine):
            self.copies[number] = (mine, STALE)
            return
        mine.clear()
        (mine.update if isinstance(mine, dict | set) else mine.extend)(after)
        self.copies[number] = (mine, self.lend(mine))
        self.changed.add(number)

    def agree_on_size(self, number: int, size: int | None) -> None:
        """An object has as many items for `len` as for a loop; an iterator (None) has no length."""
        known = self.truths.get(number)
        if self.sizes.setdefault(number, size) != size or (size is not None and known not in (None, bool(size))):
            self.doubt("an object of the program's has another length than items")

    def agree_on_truth(self, number: int, truth: bool) -> None:
        """An object with items is true, and one without is not."""
        size = self.sizes.get(number)
        if self.truths.setdefault(number, truth) != truth or (size is not None and bool(size) != truth):
            self.doubt("an object of the program's is true and has nothing in it, or the other way round")

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

    def kind_of(self, encoded: Any) -> str:
        """What a value from the program says it is; nothing of data."""
        return str(encoded["o"][1]) if isinstance(encoded, dict) and "o" in encoded else ""

    def look_up(self, names: set[str]) -> list[list[Any]]:
        """Which of the names the program has: [name, value, bases of an exception, home, number of the copy]."""
        answer = self._exchange({"op": "names", "names": sorted(names), "held": list(self.copies)})
        rows = []
        for name, value, bases, home in self._guard(lambda: [(n, v, b, h) for n, v, b, h in answer["ok"]]):
            self.copied += plain.is_copied(value)
            if name in names:
                rows.append([name, value, bases, home, self.copied])
        return rows


class RemadeClass(type):
    """An exception class of the program's, by its name and bases alone."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Made for an exception that the program raised; not for a test."""
        judge: ProgramJudge = cls._upshot_judge  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs) if judge.building else judge.doubt("an exception class of the program")


def _is_plain(data: Any) -> bool:
    """Whether a JSON form is of data that is the same wherever it is; nan is not even itself."""
    if isinstance(data, dict):
        ((tag, body),) = data.items()
        return tag in PLAIN_TAGS and _is_plain(body)
    if isinstance(data, list):
        return all(map(_is_plain, data))
    return data == data


def _is_empty(data: Any) -> bool:
    """Whether there is nothing in some list, array or the like of a JSON form."""
    if isinstance(data, dict):
        ((tag, body),) = data.items()
        return 0 in body[1] if tag == "a" else _is_empty(body)
    return isinstance(data, list) and (not data or any(map(_is_empty, data)))


def _holds_type(data: Any, outermost: bool) -> bool:
    if isinstance(data, dict):
        ((tag, body),) = data.items()
        return outermost if tag == "p" else _holds_type(body, True)
    return isinstance(data, list) and any(_holds_type(item, True) for item in data)


def _list_parts(values: Iterable[Any]) -> list[Any]:
    """Values and what plain containers among them hold."""
    waiting, found = list(values), list[Any]()
    while waiting and len(found) < MOST_PARTS:
        value = waiting.pop()
        found.append(value)
        if type(value) in (list, tuple, set, frozenset):
            waiting.extend(value)
        elif type(value) is dict:
            waiting.extend([*value, *value.values()])
    return found


# Who else holds a copy is asked of CPython's reference counts, compared with those of an object that nobody holds.


def _is_held(entry: tuple[Any, Any]) -> bool:
    """Whether the test can still see a copy, or a container inside of it."""
    for value in entry[:1]:
        if sys.getrefcount(value) > _UNHELD + 1:
            return True
    return _are_parts_held(entry[0])


def _are_parts_held(value: Any) -> bool:
    waiting = [value]
    while waiting:
        owner = waiting.pop()
        for part in [*owner.keys(), *owner.values()] if isinstance(owner, dict) else list(owner):
            if type(part) in (*CONTAINERS, tuple):
                if type(part) is not tuple and sys.getrefcount(part) > _UNHELD + 1:
                    return True
                waiting.append(part)
    return False


def _count_unheld() -> int:
    nobodys: list[list[Any]] = [[]]
    return max(sys.getrefcount(value) for value in nobodys)


_UNHELD = _count_unheld()


def judge(payload: dict[str, Any], results: program.Results, descriptor: int) -> None:
    """Run the tests against the program at the other end and write what came of each."""
    trees = [cases.parse(test) for test in payload["tests"]]
    skipped = set(payload["skip"])
    if any("unittest" in test for test in payload["tests"]):
        importlib.import_module("unittest").__dict__["main"] = lambda *_, **__: None  # we run the cases ourselves
    judge = ProgramJudge(descriptor)
    try:
        failure = judge._guard(lambda: judge.wire.receive()["ok"])
        if failure is not None:
            raise ProgramGone(f"it does not load this time: {failure}")
        court = Court(judge, payload["given"], [tree for tree in trees if isinstance(tree, ast.Module)])
        for index, tree in enumerate(trees):
            started = time.perf_counter()
            verdict = {"u": ""} if index in skipped or isinstance(tree, str) else court.verdict(tree)
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
        self.namespace |= {"type": self._ask_type, "callable": self._ask_callable, "hasattr": self._ask_attribute}
        exec(compile(evidence.hold_given(given), "given.py", "exec", dont_inherit=True), self.namespace)
        self.held = {*self.namespace}
        """What the row brings along, and our own."""
        modules = evidence.find_modules(trees) - self.namespace.keys()
        self.held |= modules
        for name in modules:
            self.namespace[name] = importlib.import_module(evidence.ALIASES.get(name, name))
        names = {name for tree in trees for name in evidence.list_names(tree) | evidence.list_definitions(tree)}
        self.namespace[CLOSED] = self._call_closed
        self.claimed: set[str] = set()
        """Names of libraries that only the program says it has from there, and names of its exceptions."""
        self.data: dict[str, Any] = {}
        """Names of the program's that are data, as they came."""
        self.owned: set[str] = set()
        """Names that mean something to the program, those of builtins among them."""
        self._bind({name for name in names - self.namespace.keys() | modules if not name.startswith("__")})

    def _bind(self, names: set[str]) -> None:
        """Bind those of the names that the program has; a builtin's or a library's is our own."""
        judge = self.judge
        for name, encoded, bases, home, number in judge.look_up(names):
            self.owned.add(name)
            if hasattr(builtins, name):
                continue
            if home in evidence.PURE and hasattr(importlib.import_module(home), name):
                self.namespace[name] = getattr(importlib.import_module(home), name)
                self.claimed.add(name)
            elif name in self.namespace:
                # A module; its name may also be that of a class of its own, as datetime is.
                if home not in evidence.PURE and judge.kind_of(encoded) != "module":
                    self.claimed.add(name)
            elif bases is not None:
                self.namespace[name] = judge._guard(lambda bases=bases: judge.class_of([str(b) for b in bases[:20]]))
                self.data[name] = encoded
            else:
                self.namespace[name] = judge.read({"ok": encoded}, NAMED, name, number)
                if type(self.namespace[name]) is not Handle:
                    self.data[name] = encoded

    def verdict(self, tree: ast.Module) -> dict[str, Any]:
        """What comes of one test: p(assed), w(rong), u(ndecided), n(othing was seen), x: none could see anything."""
        judge, names = self.judge, evidence.list_names(tree)
        shared = self.owned & (evidence.list_definitions(tree) | (names & set(dir(builtins))))
        judge.begin_test()
        judge.simple = evidence.is_simple(tree) and not names & self.data.keys()
        judge.shares = judge.heard or evidence.shares_results(tree)  # tests share what they define
        before = judge.asked
        checked = cases.CheckCounter(lambda function: type(function) is Handle, judge.forget_fed)
        failure: BaseException | None = None
        try:
            if shared:  # plainly there is one of the name, and who came last has it
                judge.doubt(f"both the test and the program have a {min(shared)}")
            if claimed := names & self.claimed:
                judge.doubt(f"only the program says where it has {min(claimed)} from")
            cases.run(evidence.mark_closed_calls(tree, CLOSED, self.held), self.namespace, checked)
        except BaseException as error:
            failure = error
        try:  # also of a test that failed: it may have failed because of that
            judge.check_rest()
            self._check_globals(names & self.data.keys())
        except BaseException as error:
            failure = failure or error
        if judge.gone:
            raise ProgramGone(judge.gone)
        if judge.undecided:
            return {"u": judge.undecided}
        if judge.empty and evidence.list_libraries(tree) & {"np", "numpy", "pytest"}:
            return {"u": "nothing compares as equal to anything, item by item"}
        if failure is not None:
            return _read_failure(failure, judge.simple)
        if judge.asked == before and not names & self.data.keys():
            return {"n": "it asks the program nothing"} if checked.count else {"x": "none of its checks was executed"}
        return {"p": True} if checked.count else {"n": "none of its checks was reached"}

    def _check_globals(self, names: set[str]) -> None:
        now = {name: value for name, value, *_ in self.judge.look_up(names)} if names else {}
        if now != {name: self.data[name] for name in names}:
            self.judge.doubt("a global of the program changes while the test runs")

    def _call_closed(self, function: Any, literal: bool) -> Any:
        """What a test calls with nothing of the program's: nothing is fed back by that."""
        if type(function) not in (Handle, Method):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            self.judge.closed, self.judge.literal = True, literal
            return function(*args, **kwargs)

        return call

    # Three builtins that would answer for the handle instead of the object.

    def _ask_type(self, *args: Any) -> Any:
        if type(args[0]) is Handle:
            self.judge.doubt("the type of one of the program's objects tells nothing that data would")
        return type(*args)

    def _ask_callable(self, value: Any) -> bool:
        if type(value) is Handle:
            self.judge.doubt("whether one of the program's objects can be called")
        return callable(value)

    def _ask_attribute(self, value: Any, name: str) -> bool:
        if type(value) is Handle and name.startswith("__"):
            self.judge.doubt("a special attribute of one of the program's objects")
        return hasattr(value, name)


def _read_failure(error: BaseException, simple: bool) -> dict[str, Any]:
    """An assert that failed on plain data is a failure; everything else that is raised here was not raised plainly."""
    if simple and isinstance(error, AssertionError) and "remote_tail" not in error.__dict__:
        return {"w": str(error)[-500:]}
    return {"u": f"raised only before the judge: {program.describe(error)[1]}"[-program.TAIL_CHARS :]}
