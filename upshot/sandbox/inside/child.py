"""The first and last step of a confined child: pick its role, play it, exit.

It finds its files on fixed descriptors: 0 to 2 as everywhere, 3 the input (sealed, read once and closed), 4 the results
(lines of JSON), 5 a socket if its role has a partner: the judge, the judged program, or the supervisor of a session.
A program can write on 4 and 5, too, so everything that comes from there is untrusted. It exits by `os._exit`: the
interpreter's normal end would run code that the program has left in it, outside the program's clock.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable
from typing import Any

from upshot.sandbox.inside import judge, native, program, remote, session

PARTS: dict[str, Callable[..., int | None]] = {
    "calls": program.answer_calls,
    "tests": program.try_tests,
    "script": program.run_script,
    "native": native.run,
    "serve": remote.serve,
    "judge": judge.judge,
    "session": session.serve,
}
"""By the mode of a role: a function of (payload, results, partner's socket) that returns an exit code."""


def main(role: dict[str, Any], descriptors: list[int]) -> None:
    """Play the role on 0 stdin, 1 stdout, 2 stderr, 3 input, 4 results, 5 partner; never returns."""
    code = 0
    try:
        os.environ.update(role["environment"])
        os.write(descriptors[4], program.STARTED)
        with open(descriptors[3], "rb", buffering=0) as file:
            payload = marshal.loads(file.readall())  # our supervisor's own, from the same interpreter
        program.reseed(payload.get("program", "random"), payload.get("seed"))
        code = PARTS[role["mode"]](payload, program.Results(descriptors[4]), *descriptors[5:]) or 0
        program.flush()
    except BaseException as error:
        code = 1
        os.write(2, program.describe(error)[1].encode(errors="replace"))
    finally:
        os._exit(code)
