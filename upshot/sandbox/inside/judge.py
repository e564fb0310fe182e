"""The judge: a clean process that runs the tests itself and reaches the program only through calls.

Builtins and well-known helpers are its own, never the program's. What comes back is data, compared here, or a handle to
one of the program's objects, which equals no data whatever its `__eq__` says.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
import time
from typing import Any

from upshot.sandbox.inside import program
from upshot.sandbox.inside.peer import Peer, PeerGone

HELPERS = """
import math, itertools, collections, functools, re, string, json, random, copy, operator, datetime
from math import isclose
from collections import Counter, defaultdict, deque, OrderedDict, namedtuple
from fractions import Fraction
from decimal import Decimal
"""
LIBRARIES = {
    "np": "numpy",
    "numpy": "numpy",
    "pd": "pandas",
    "pandas": "pandas",
    "scipy": "scipy",
    "sympy": "sympy",
    "allclose": "numpy:allclose",
    "array_equal": "numpy:array_equal",
}
"""Names of libraries, and helpers of theirs that decide a test, with where they really come from."""


class Judge(Peer):
    """The judge's end of the wire."""

    def proxy(self, handle: int, kind: str) -> Any:
        return Remote(self, handle, kind)

    def handle_of(self, value: Any) -> int | None:
        return object.__getattribute__(value, "_handle") if type(value) is Remote else None

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """The program calls a function the test gave it."""
        if message["op"] != "call":
            return {"error": "only calls"}
        try:
            return self.call(self.exports[int(message["target"])], message["args"], message["kwargs"])
        except PeerGone:
            raise
        except BaseException as error:
            return {"error": program.describe(error)[0]}

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """A request whose failure is raised here as the exception it was there."""
        reply = self.request({"op": op, **fields})
        if "error" in reply:
            raise self.exception(*reply["error"])
        return reply

    def exception(self, name: str, bases: list[str], text: str, tail: str) -> BaseException:
        """The program's exception, as the nearest class known here."""
        kind: Any = self.classes.get(name) or next((c for b in bases if (c := _builtin_exception(b))), Exception)
        error: BaseException = kind(text) if kind is not UnicodeDecodeError else ValueError(text)
        error.__dict__["remote_tail"] = tail
        return error

    classes: dict[str, type]


def _builtin_exception(name: str) -> type | None:
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


class Remote:
    """An object of the program's, by handle."""

    def __init__(self, judge: Judge, handle: int, kind: str, trusted: bool = False) -> None:
        object.__setattr__(self, "_judge", judge)
        object.__setattr__(self, "_handle", handle)
        object.__setattr__(self, "_kind", kind)
        # Whether arithmetic with data is believed: for classes a test names, not for what a function returned,
        # or an object could subtract itself to zero.
        object.__setattr__(self, "_trusted", trusted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        judge = self._judge
        encoded = [judge.encode(item) for item in args]
        named = {name: judge.encode(item) for name, item in kwargs.items()}
        reply = judge.ask("call", target=self._handle, args=encoded, kwargs=named)
        for mine, after in zip(args, reply["args"], strict=False):
            _take_over(mine, judge.decode(after))
        return self._mark(judge.decode(reply["ok"]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__dict__", "__len__"):
            raise AttributeError(name)
        return self._mark(self._judge.decode(self._judge.ask("get", target=self._handle, name=name)["ok"]))

    def __setattr__(self, name: str, value: Any) -> None:
        self._judge.ask("set", target=self._handle, name=name, value=self._judge.encode(value))

    def __iter__(self) -> Any:
        reply = self._judge.ask("list", target=self._handle)
        return iter([self._mark(self._judge.decode(item)) for item in reply["ok"]])

    def _mark(self, value: Any) -> Any:
        if type(value) is Remote and self._trusted:
            object.__setattr__(value, "_trusted", True)
        return value

    def _operate(self, name: str, *args: Any) -> Any:
        encoded = [self._judge.encode(item) for item in args]
        return self._mark(self._judge.decode(self._judge.ask("operate", name=name, args=encoded)["ok"]))

    def __eq__(self, other: object) -> bool:
        return type(other) is Remote and bool(self._operate("eq", self, other))

    def __ne__(self, other: object) -> bool:
        return type(other) is not Remote or bool(self._operate("ne", self, other))

    def __hash__(self) -> int:
        return hash(self._handle)

    def __bool__(self) -> bool:
        return bool(self._operate("bool", self))

    def __len__(self) -> int:
        return int(self._operate("len", self))

    def __str__(self) -> str:
        return str(self._operate("str", self))

    def __repr__(self) -> str:
        return str(self._operate("repr", self))

    def __next__(self) -> Any:
        return self._operate("next", self)

    def __getitem__(self, key: Any) -> Any:
        return self._operate("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._operate("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._operate("delitem", self, key)

    def __contains__(self, key: Any) -> bool:
        return bool(self._operate("contains", self, key))


def _operator(name: str, swapped: bool) -> Any:
    def apply(self: Remote, other: Any) -> Any:
        if type(other) is not Remote and not self._trusted:
            return NotImplemented
        return self._operate(name, other, self) if swapped else self._operate(name, self, other)

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"):
    _bare = _name.rstrip("_")
    setattr(Remote, f"__{_bare}__", _operator(_name, swapped=False))
    setattr(Remote, f"__r{_bare}__", _operator(_name, swapped=True))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _operator(_name, swapped=False))


def _take_over(mine: Any, after: Any) -> None:
    """Make our copy of a mutable argument look as the call left the program's."""
    if after is None or mine == after:
        return
    if isinstance(mine, (list, bytearray)):
        mine[:] = after
    elif isinstance(mine, (dict, set)):
        mine.clear()
        mine.update(after)


def _isinstance(value: Any, kind: Any) -> bool:
    """isinstance that also answers for the program's classes and objects."""
    if type(kind) is tuple:
        return any(_isinstance(value, one) for one in kind)
    if type(kind) is Remote:
        return type(value) is Remote and bool(kind._operate("isinstance", value, kind))
    return builtins.isinstance(value, kind)


def _callable(value: Any) -> bool:
    return type(value) is Remote or builtins.callable(value)


def judge(payload: dict[str, Any], results: program.Results, descriptor: int) -> None:
    """Run every test against the program at the other end and write what came of each."""
    peer = Judge(descriptor)
    peer.classes = {}
    try:
        failure = peer.wire.receive()["loaded"]
    except PeerGone:
        failure = ["SystemExit", "the program ended while it was loaded"]
    if failure is not None:
        results.put({"load": failure, "t": 0.0})
        return
    try:
        namespace = _namespace(peer, payload["tests"])
        for test in payload["tests"]:
            started = time.perf_counter()
            results.put({**_verdict(test, namespace), "t": time.perf_counter() - started})
    except PeerGone:
        results.put({"gone": True})


def _namespace(peer: Judge, tests: list[str]) -> dict[str, Any]:
    """Names for the tests: our own helpers first, then what the program defines."""
    namespace: dict[str, Any] = {"__name__": "tests", "isinstance": _isinstance, "callable": _callable}
    exec(HELPERS, namespace)
    names, modules = _names(tests)
    _import_libraries(namespace, names, modules)
    # A library's name is never looked up in the program: it could answer for it.
    wanted = sorted(names - set(namespace) - set(dir(builtins)) - set(LIBRARIES))
    for name, found in peer.ask("names", names=wanted)["ok"].items():
        if found["bases"]:
            base = next((c for b in found["bases"] if (c := _builtin_exception(b))), Exception)
            namespace[name] = peer.classes[name] = type(name, (base,), {})
            continue
        value = peer.decode(found["value"])
        if type(value) is Remote and name[:1].isupper():
            object.__setattr__(value, "_trusted", True)
        namespace[name] = value
    return namespace


def _import_libraries(namespace: dict[str, Any], names: set[str], modules: set[str]) -> None:
    """Bind the libraries the tests use without importing them, from our own installation."""
    for name in sorted(names & (set(LIBRARIES) | modules) - set(namespace)):
        module, _, attribute = LIBRARIES.get(name, name).partition(":")
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        namespace[name] = getattr(found, attribute) if attribute else found


def _names(tests: list[str]) -> tuple[set[str], set[str]]:
    """The names tests use, and those of them used only as a standard module is: `name.attribute`, never called."""
    names: set[str] = set()
    called: set[str] = set()
    dotted: set[str] = set()
    for test in tests:
        try:
            tree = ast.parse(test)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.add(node.func.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                dotted.add(node.value.id)
    return names, (dotted - called) & sys.stdlib_module_names


def _verdict(test: str, namespace: dict[str, Any]) -> dict[str, Any]:
    try:
        exec(compile(test, "test.py", "exec", dont_inherit=True), namespace)
    except PeerGone:
        raise
    except BaseException as error:
        tail = getattr(error, "remote_tail", None)
        if isinstance(error, AssertionError) and tail is None:
            return {"w": str(error)[:500]}
        name, own_tail = program.describe(error)
        return {"e": [name, tail or own_tail]}
    return {"p": True}
