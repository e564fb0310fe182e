"""A Python session inside its child: one namespace, one turn after another, output on the memory files."""

from __future__ import annotations

import ast
import linecache
import signal
from typing import Any

from upshot.sandbox.inside import program
from upshot.sandbox.inside.remote import Wire

_in_turn = False
"""Whether a turn is running that an interrupt may end; a late interrupt must not end the session."""


def _interrupt(*_: object) -> None:
    if _in_turn:
        raise KeyboardInterrupt


def serve(payload: dict[str, Any], results: program.Results, descriptor: int) -> None:
    """Run the turns that arrive until the supervisor hangs up; an interrupt may end only a turn."""
    global _in_turn
    signal.signal(signal.SIGINT, _interrupt)
    wire = Wire(descriptor)
    namespace = program.fresh_namespace("", "__main__")
    wire.send({"ready": True})
    while True:
        try:
            message = wire.receive()
        except EOFError:
            return  # the supervisor has hung up
        try:
            _in_turn = True
            failure = _turn(str(message["code"]), namespace)
        except KeyboardInterrupt as error:
            failure = program.describe(error)
        finally:
            _in_turn = False
        program.flush()
        wire.send({"error": failure})


def _turn(code: str, namespace: dict[str, Any]) -> list[str] | None:
    """Run one turn; a last expression is printed as by the interactive prompt."""
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
        program.print_error(failure[1])
        return failure
    return None
