"""The untrusted program inside its child: load it, report errors, write its results."""

from __future__ import annotations

import ast
import atexit
import base64
import contextlib
import importlib
import json
import linecache
import os
import sys
import threading
import time
import traceback
import types
from typing import Any

from upshot.sandbox.inside import cases, evidence, plain

FILENAME = "program.py"
TAIL_CHARS = 2000
RESERVE = 4096
OUR_FRAMES = 100
"""Extra recursion depth for a program that runs here, because some of the calls are ours."""
STARTED = b"\n"
"""The first line in a child's results: its walls are up, and the program causes everything after it."""
_write, _monotonic = os.write, time.perf_counter
_dumps = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode


class Results:
    """Lines of JSON in the result file; a line too big for the remaining space is replaced by one that says so."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.left = os.fstat(descriptor).st_size - RESERVE

    def put(self, line: dict[str, Any]) -> None:
        """Write one line."""
        text = _dumps(line).encode() + b"\n"
        if len(text) > self.left:
            text = _dumps({"big": len(text)}).encode() + b"\n"
        self.left -= len(text)
        while text:
            text = text[_write(self.descriptor, text) :]


def write_files(files: dict[str, bytes]) -> None:
    """Put the run's files under the working directory."""
    for name, content in files.items():
        path = os.path.normpath(name)
        if os.path.isabs(path) or path.startswith(".."):
            raise ValueError(f"file name {name!r} leaves the working directory")
        if os.path.dirname(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def fresh_namespace(source: str, name: str) -> dict[str, Any]:
    """An empty module to run the program in, with its lines known to tracebacks."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__dict__["__file__"] = FILENAME
    linecache.cache[FILENAME] = (len(source), None, source.splitlines(True), FILENAME)
    return module.__dict__


def describe(error: BaseException) -> list[str]:
    """[type name, end of the traceback] of an exception whose own methods may be hostile."""
    name = str(type.__getattribute__(type(error), "__name__"))[:200]
    try:
        text = "".join(traceback.format_exception(type(error), error, _own_frames(error), limit=-8))
    except BaseException:
        text = f"{name}: <its description failed>"
    return [name, text[-TAIL_CHARS:]]


def _own_frames(error: BaseException) -> types.TracebackType | None:
    """The traceback from the program's first frame on."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename != FILENAME and step.tb_next is not None:
        step = step.tb_next
    return step


def load(source: str, name: str) -> dict[str, Any]:
    """Run the program's top level and return its namespace."""
    namespace = fresh_namespace(source, name)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + OUR_FRAMES))
    exec(compile(source, FILENAME, "exec", dont_inherit=True), namespace)
    return namespace


def flush() -> None:
    """Flush buffered output; a program may have closed, replaced or filled the stream."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):
        with contextlib.suppress(BaseException):
            stream.flush()  # type: ignore[union-attr]


def load_to_ask(source: str) -> dict[str, Any]:
    """Run the program's top level as a module; it is called `__main__` when its functions are."""
    namespace = load(source, "program")
    namespace[cases.PROGRAM] = sys.modules["program"]
    namespace["__name__"] = evidence.MAIN
    return namespace


def answer_calls(payload: dict[str, Any], results: Results) -> None:
    """Load the program, evaluate each call, write the values."""
    plain.answer_calls(lambda: load_to_ask(payload["program"]), payload["calls"], results.put, describe)


def try_tests(payload: dict[str, Any], results: Results) -> None:
    """The plain look: program and tests in one namespace, as is usual; writes a line for each test."""
    trees = [cases.parse(test) for test in payload["tests"]]
    cases.prepare(payload["tests"])
    started = _monotonic()
    try:
        namespace = load_to_ask(payload["program"])
    except BaseException as error:
        results.put({"load": describe(error), "t": _monotonic() - started})
        return
    sys.modules[evidence.MAIN] = sys.modules["program"]
    for tree in trees:
        started = _monotonic()
        results.put({**_try_test(tree, namespace), "t": _monotonic() - started})


def _try_test(tree: ast.Module | str, namespace: dict[str, Any]) -> dict[str, Any]:
    if isinstance(tree, str):
        return {"w": tree}
    try:
        cases.run(tree, namespace, cases.CheckCounter())
        return {"p": True}
    except AssertionError as error:
        return {"w": str(error)[-500:]}
    except BaseException as error:
        return {"e": describe(error)}


def run_script(payload: dict[str, Any], results: Results) -> int:
    """Run the program as `python program.py` would; returns the exit code."""
    write_files(payload.get("files", {}))
    sys.argv[:] = [FILENAME]
    sys.path.insert(0, os.getcwd())
    code = 0
    try:
        load(payload["program"], "__main__")
        threading._shutdown()  # type: ignore[attr-defined]
    except SystemExit as error:
        code = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        code, (name, text) = 1, describe(error)
        print_error(text)
        results.put({"e": [name]})
    atexit._run_exitfuncs()
    flush()
    vars(sys.modules["__main__"]).clear()  # as at the interpreter's end, where open files are written
    fetch_files(payload.get("fetch", []), results)
    return code


def fetch_files(names: list[str], results: Results) -> None:
    """Return files of the working directory, in base64."""
    for name in names:
        path = os.path.normpath(name)
        if os.path.isabs(path) or path.startswith("..") or not os.path.isfile(path):
            continue
        with open(path, "rb") as file:
            results.put({"file": [name, base64.b64encode(file.read(1 << 22)).decode()]})


def print_error(text: str) -> None:
    """Write to standard error; a program may have closed or replaced the stream."""
    try:
        sys.stderr.write(text)
    except BaseException:
        os.write(2, text.encode(errors="replace"))


def reseed(source: str, seed: int | None) -> None:
    """Give the random generators fresh seeds if the program may use them, because all runs are forks of one process.

    Both looks at a program get the same seed, so that random numbers make no difference between them.
    """
    if "random" not in source:
        return
    if "random" in sys.modules:
        sys.modules["random"].seed(seed)
    if "numpy" in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy.random").seed(seed)
