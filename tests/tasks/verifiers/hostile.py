"""Verifiers that misbehave, for the tests of limits. Named by path: `hostile:Loops`."""

import os
import signal
import time
from typing import Any

from upshot.core.score import Score
from upshot.tasks.verifiers.base import Extra, Verifier


class Hostile(Verifier):
    """Does what the response says."""

    def score(self, response: str, reference: Any, extra: Extra) -> Score:
        if response == "loop":
            while True:
                pass
        if response == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if response == "memory":
            hoard = []
            while len(hoard) < 640:
                hoard.append(bytearray(16 * 2**20))
        if response == "raise":
            raise RuntimeError("no")
        if response == "recurse":
            return self.score(response, reference, extra)
        if response == "exit":
            os._exit(3)
        if response.startswith("spin"):
            stop = time.process_time() + float(response.split()[1])
            while time.process_time() < stop:
                pass
        return Score(float(response == reference))
