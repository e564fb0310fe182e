"""A Python session inside its child: one namespace, one turn after another, output on the memory files."""

from __future__ import annotations

import ast
import linecache
import signal
import sys
from typing import Any

from upshot.sandbox.inside import program
from upshot.sandbox.inside.remote import Wire

_in_turn = False
"""Whether an interrupt has a turn to end; one that comes too late must not end the session."""


def _interrupt(*_: object) -> None:
    if _in_turn:
        raise KeyboardInterrupt


def serve(descriptor: int) -> None:
    """Run the turns that arrive until the supervisor hangs up."""
    signal.signal(signal.SIGINT, _interrupt)
    wire = Wire(descriptor)
    namespace = program.fresh_namespace("", "__main__")
    wire.send({"ready": True})
    while True:
        try:
            message = wire.receive()
        except EOFError:
            return  # the supervisor has hung up
        failure = _interruptible(str(message["code"]), namespace)
        program.flush()
        wire.send({"error": failure})


def _interruptible(code: str, namespace: dict[str, Any]) -> list[str] | None:
    """Run one turn, the only thing an interrupt may end."""
    global _in_turn
    try:
        _in_turn = True
        return _turn(code, namespace)
    except KeyboardInterrupt as error:
        return program.describe(error)
    finally:
        _in_turn = False


def _turn(code: str, namespace: dict[str, Any]) -> list[str] | None:
    """Run one turn; a last expression is printed as the interactive prompt would."""
    linecache.cache[program.FILENAME] = (len(code), None, code.splitlines(True), program.FILENAME)
    try:
        tree = ast.parse(code, program.FILENAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, program.FILENAME, "exec", dont_inherit=True), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), program.FILENAME, "eval", dont_inherit=True), namespace)
            if value is not None:
                print(repr(value))
    except BaseException as error:
        failure = program.describe(error)
        try:
            sys.stderr.write(failure[1])
        except BaseException:
            return failure
        return failure
    return None
