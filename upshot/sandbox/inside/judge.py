"""The judge: a clean process that runs the tests itself and reaches the program only through calls.

Builtins and well-known helpers are its own, never the program's. What comes back is data, compared here, or a handle to
one of the program's objects, which is evidence of nothing but what calls and attributes of it give.
"""

from __future__ import annotations

import ast
import builtins
import collections
import copy
import datetime
import decimal
import fractions
import functools
import importlib
import io
import itertools
import json
import math
import operator
import random
import re
import string
import sys
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

from upshot.sandbox.inside import cases, program
from upshot.sandbox.inside.handle import Handle, NotEvidence, ObjectView, in_role
from upshot.sandbox.inside.peer import Peer, PeerGone, take_over

MODULES = (math, itertools, collections, functools, re, string, json, random, copy, operator, datetime)
HELPERS: dict[str, Any] = {
    **{module.__name__: module for module in MODULES},
    **{name: getattr(collections, name) for name in ("Counter", "defaultdict", "deque", "OrderedDict", "namedtuple")},
    "isclose": math.isclose,
    "Fraction": fractions.Fraction,
    "Decimal": decimal.Decimal,
}
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
MODULE = "__main__"


class ProgramJudge(Peer):
    """The judge's end of the wire."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.refused = ""
        """What the running test asked of a handle that is no evidence."""
        self.asked = 0
        """How often the program has been asked for something."""
        self.pending: dict[int, collections.deque[Any]] = {}
        self.views: dict[int, ObjectView] = {}

    def proxy(self, number: int, kind: str) -> Any:
        if number not in self.proxies:
            self.proxies[number] = Handle(self, number, kind)
        return _coroutine(self.proxies[number]) if kind == "coroutine" else self.proxies[number]

    def view(self, number: int) -> ObjectView:
        """What one of the program's objects has said it holds since the program was last called."""
        return self.views.setdefault(number, ObjectView())

    def permit(self, op: str, target: Any, name: str) -> None:
        """The program may call what a test gave it and use objects of the test's own classes, by public names."""
        owned = type(target).__module__ == MODULE or type(target) in (io.StringIO, io.BytesIO)
        method = op == "set" and callable(getattr(type(target), name, None))
        allowed = (
            (op == "observe" and name == "bool")
            or (op == "call" and callable(target))
            or (op == "get" and name == "__name__" and callable(target))
            or (op == "observe" and name in ("iter", "next") and isinstance(target, Iterator))
            or (owned and not name.startswith("__") and not method and not hasattr(target, "failureException"))
        )
        if not allowed or (isinstance(target, type | types.ModuleType) and op != "call"):
            raise AttributeError(f"a {type(target).__name__} of the test's has no {name or op} for the program")

    def described(self, error: BaseException) -> dict[str, Any]:
        """A failure inside the test, without its lines; what it asserts is not the program's to know."""
        told = super().described(error)
        if isinstance(error, AssertionError) and "remote_tail" not in error.__dict__:
            self.refused = self.refused or f"an assert failed in a function the program called: {error}"[:300]
        hidden = isinstance(error, AssertionError | NotEvidence)
        return {**told, "tail": "", **({"text": "", "args": {"t": []}, "state": {"d": []}} if hidden else {})}

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Ask the program, and count it."""
        self.asked += 1
        if op in ("call", "set") or fields.get("name") in ("setitem", "delitem", "enter", "exit"):
            for view in self.views.values():
                view.stale = True
            self.views.clear()
        return super().ask(op, **fields)

    def received(self, reply: dict[str, Any]) -> None:
        """Take over what the program changed in place inside the test's objects."""
        for number, name, after in reply.get("lent", ()):
            target = self.exports[number]
            self.permit("set", target, name)
            take_over(getattr(target, name), self.decode(after))

    def bind(self, wanted: set[str], namespace: dict[str, Any]) -> set[str]:
        """Bind those of the wanted names the program has; returns those that work without asking it."""
        reply = self.ask("names", names=sorted(wanted))
        data = set()
        for name, encoded, bases in self.guarded(lambda: [(n, v, b) for n, v, b in reply["names"] if n in wanted]):
            if bases is not None:
                known = self.guarded(lambda bases=bases: type(self.rebuilt({**_ERROR, "bases": bases})))
                namespace[name] = self.classes[name] = type(name, (known,), {})
                data.add(name)
                continue
            namespace[name] = value = self.guarded(self.decode, encoded)
            if type(value) is not Handle:
                data.add(name)
            elif name[:1].isupper():
                namespace[name] = in_role(value, "class")
        return data


async def _coroutine(handle: Handle) -> Any:
    """A coroutine of the program's: awaiting it runs it there."""
    return handle._observe("await")


_ERROR: dict[str, Any] = {"text": "", "args": {"t": []}, "state": {"d": []}, "tail": ""}


def judge(payload: dict[str, Any], results: program.Results, descriptor: int) -> None:
    """Run every test against the program at the other end and write what came of each."""
    trees = [cases.parse(test) for test in payload["tests"]]
    invalid = cases.faults(trees)
    results.put({"invalid": {str(index): why for index, why in invalid.items()}})
    if any("unittest" in test for test in payload["tests"]):
        importlib.import_module("unittest").__dict__["main"] = lambda *_, **__: None  # we run the cases ourselves
    peer = ProgramJudge(descriptor)
    try:
        failure = peer.guarded(lambda: peer.wire.receive()["loaded"])
        if failure is not None:
            results.put({"load": failure, "t": 0.0})
            return
        court = Court(peer, [tree for tree in trees if not isinstance(tree, str)])
        for tree in trees:
            started = time.perf_counter()
            results.put({**court.verdict(tree), "t": time.perf_counter() - started})
    except BaseException as error:  # it has gone, or answers even the question for its names with an exception
        results.put({"gone": str(error)[:300]})


class Court:
    """The namespace tests share, and the verdict on each."""

    def __init__(self, peer: ProgramJudge, trees: Sequence[ast.Module]) -> None:
        self.peer = peer
        module = types.ModuleType(MODULE)
        sys.modules[MODULE] = module
        self.namespace = module.__dict__
        self.namespace.update(HELPERS)
        names, modules = _names(trees)
        _import_libraries(self.namespace, names, modules)
        # A library's name is never looked up in the program: it could answer for it.
        known = set(self.namespace) | set(dir(builtins)) | set(LIBRARIES) | {cases.COUNTER}
        wanted = {name for name in names - known if not name.startswith("__")}
        self.data = peer.bind(wanted, self.namespace)

    def verdict(self, tree: ast.Module | str) -> dict[str, Any]:
        """What comes of one test: p(assed), w(rong), e(rror), or x: it told nothing, whatever the program is."""
        if isinstance(tree, str):
            return {"x": tree}
        peer, names = self.peer, _names([tree])[0]
        peer.refused, before = "", peer.asked
        checked = cases.CheckCounter(lambda function: type(function) is Handle)
        failure: BaseException | None = None
        try:
            cases.run(tree, self.namespace, checked)
        except BaseException as error:
            failure = error
        if peer.gone:
            raise PeerGone(peer.gone)
        if peer.refused:
            return {"w": peer.refused}
        if failure is not None:
            return _failed(failure)
        if checked.count:
            return {"p": True}
        if peer.asked == before and not names & self.data:
            return {"x": "none of its checks was executed"}
        return {"w": "with what the program gave, none of the test's checks was reached"}


def _failed(error: BaseException) -> dict[str, Any]:
    tail = getattr(error, "remote_tail", None)
    if isinstance(error, AssertionError) and tail is None:
        return {"w": str(error)[-500:]}
    if isinstance(error, cases.CaseError):
        return {"e": ["CaseError", str(error)[-program.TAIL_CHARS :]]}
    name, own_tail = program.describe(error)
    return {"e": [name, tail or own_tail]}


def _import_libraries(namespace: dict[str, Any], names: set[str], modules: set[str]) -> None:
    """Bind the libraries the tests use without importing them, from our own installation."""
    for name in sorted(names & (set(LIBRARIES) | modules) - set(namespace)):
        module, _, attribute = LIBRARIES.get(name, name).partition(":")
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        namespace[name] = getattr(found, attribute) if attribute else found


def _names(trees: Sequence[ast.Module]) -> tuple[set[str], set[str]]:
    """The names tests use, and those of them used only as a standard module is: `name.attribute`, never called."""
    names: set[str] = set()
    called: set[str] = set()
    dotted: set[str] = set()
    for node in (node for tree in trees for node in cases.walk(tree)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            dotted.add(node.value.id)
    return names, (dotted - called) & sys.stdlib_module_names
