"""The Triton kernels are right: by Triton's interpreter here, and on the device where there is one.

The interpreter is chosen when Triton is first imported, which other tests may have done: so a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent.parent
CHECKS = [
    *(TESTS / "engine" / f"{kind}_checks.py" for kind in ("kernel", "runner", "exact")),
    *(TESTS / "training" / "learner" / f"{kind}_kernel_checks.py" for kind in ("block", "logprob")),
]


def run_checks(file: Path, interpret: bool) -> None:
    """Run a file of checks in a process of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if interpret else {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "tests.support.interpreter"] if interpret else []
    done = subprocess.run([*command, str(file)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("file", CHECKS, ids=lambda file: file.stem)
def test_kernels_agree_with_pytorch_in_the_interpreter(file: Path) -> None:
    pytest.importorskip("triton")
    run_checks(file, interpret=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("file", CHECKS, ids=lambda file: file.stem)
def test_kernels_agree_with_pytorch_on_the_device(file: Path) -> None:
    run_checks(file, interpret=False)
