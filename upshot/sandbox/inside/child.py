"""The first and last thing a confined child does: pick its part, play it, leave."""

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
        payload = program.read_payload(descriptors[3])
        program.reseed(payload.get("program", "random"))
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
    elif mode == "script":
        return program.run_script(payload, results)
    elif mode == "native":
        return native.run(payload, results)
    elif mode == "serve":
        remote.serve(payload, results, descriptors[5])
    elif mode == "judge":
        judge.judge(payload, results, descriptors[5])
    elif mode == "session":
        session.serve(payload, descriptors[5])
    return 0
