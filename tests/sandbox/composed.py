"""Test expressions composed at random around a call, with programs that tamper with builtins: none may pass.

python -m tests.sandbox.composed 500    # this many, each program in a separate process
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from tests.sandbox import lies
from upshot.sandbox import Outcome
from upshot.sandbox.asserts.verdict import Remains, of_judged
from upshot.sandbox.inside import judge, remote
from upshot.sandbox.outcome import TestResult


class Lines(list[dict[str, Any]]):
    """Result lines in memory."""

    put = list.append


def judged(other_end: Callable[[socket.socket], None], test: str) -> TestResult:
    """The verdict of the judge, running in this process, on a program at the other end of a connection."""
    ours, theirs = socket.socketpair()
    party = threading.Thread(target=other_end, args=(theirs,))
    party.start()
    lines = Lines()
    judge.judge({"tests": [test], "given": "", "skip": []}, lines, os.dup(ours.fileno()))  # type: ignore[arg-type]
    ours.shutdown(socket.SHUT_RDWR)
    ours.close()
    party.join()
    # The plain check reports the program's own claim; a liar claims that everything passed.
    return of_judged([TestResult(Outcome.PASSED)], Remains(lines=lines))[0]


def serving_apart(source: str) -> Callable[[socket.socket], None]:
    """A program in a separate process, where it may tamper with builtins."""

    def serve(end: socket.socket) -> None:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.dup2(
                    end.fileno(), 3
                )  # and no other end of the connection, or nobody notices that the judge hangs up
                os.closerange(4, 1024)
                remote.serve({"program": source}, None, 3)  # type: ignore[arg-type]
            os._exit(0)
        end.close()
        os.waitpid(child, 0)

    return serve


def main(count: int) -> int:
    """Judge this many; print the first that passes."""
    import numpy  # noqa: F401 (here, not in every fork)

    dice = random.Random(20261117)
    for number in range(count):
        test, source = lies.expression_test(dice), lies.patched_program(dice)
        result = judged(serving_apart(source), test)
        if result.passed:
            print(f"{number} passed: {result}\n{test}\nby\n{source}")
            return 1
    print(f"{count} tests, none passed")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
