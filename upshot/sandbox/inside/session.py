"""A Python session inside its child: one namespace, one turn after another, output on the memory files."""

from __future__ import annotations

import ast
import linecache
import sys
import time
from typing import Any

from upshot.sandbox.inside import program
from upshot.sandbox.inside.peer import PeerGone, Wire


def serve(payload: dict[str, Any], descriptor: int) -> None:
    """Run the turns that arrive until the supervisor hangs up."""
    wire = Wire(descriptor)
    namespace = program.fresh_namespace("", "__main__")
    program.write_files(payload.get("files") or {})
    wire.send({"ready": True})
    while True:
        try:
            message = wire.receive()
        except PeerGone:
            return
        except KeyboardInterrupt:
            continue
        started = time.perf_counter()
        failure = _turn(str(message["code"]), namespace)
        program.flush()
        wire.send({"error": failure, "t": time.perf_counter() - started})


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
