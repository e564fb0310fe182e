"""Imports without garbage collection leave collecting as it was."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from upshot.models.frameworks import import_frameworks
runs = []
gc.callbacks.append(lambda phase, info: runs.append(phase))
import_frameworks()
assert not runs and gc.isenabled() and gc.get_freeze_count() > 100_000
frozen = gc.get_freeze_count()
import_frameworks()
assert gc.get_freeze_count() == frozen
"""


def test_nothing_is_collected_while_importing_and_collecting_goes_on_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nothing is reported as leaked at the end"
