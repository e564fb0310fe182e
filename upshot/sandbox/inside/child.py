"""The first and last thing a confined child does: pick its part, play it, leave.

It finds its files on fixed descriptors: 0 to 2 as everywhere, 3 the input (sealed, read once and closed), 4 the results
(lines of JSON), 5 a socket where its role has a partner: the judge, the judged program, or the supervisor of a session.
A program can write on 4 and 5, too; so what comes from there is read as an adversary's. It leaves by `os._exit`: the
interpreter's own end would run what the program has left in it, outside the program's clock.
"""

from __future__ import annotations

import os
from typing import Any

from upshot.sandbox.inside import judge, native, program, remote, session


def main(role: dict[str, Any], descriptors: list[int]) -> None:
    """Play the role on 0 stdin, 1 stdout, 2 stderr, 3 input, 4 results, 5 the other party; never returns."""
    code = 0
    try:
        for name, value in role.get("environment", {}).items():
            os.environ[name] = value
        os.write(descriptors[4], program.STARTED)
        payload = program.read_payload(descriptors[3])
        program.reseed(payload.get("program", "random"), payload.get("seed"))
        code = _play(role["mode"], payload, descriptors)
        program.flush()
    except BaseException as error:
        code = 1
        os.write(2, program.describe(error)[1].encode(errors="replace"))
    finally:
        os._exit(code)


def _play(mode: str, payload: dict[str, Any], descriptors: list[int]) -> int:
    results = program.Results(descriptors[4])
    if mode == "calls":
        program.answer_calls(payload, results)
    elif mode == "tests":
        program.try_tests(payload, results)
    elif mode == "script":
        return program.run_script(payload, results)
    elif mode == "native":
        return native.run(payload, results)
    elif mode == "serve":
        remote.serve(payload, descriptors[5])
    elif mode == "judge":
        judge.judge(payload, results, descriptors[5])
    elif mode == "session":
        session.serve(descriptors[5])
    return 0
