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

CHECKS = ["kernel_checks.py", "runner_checks.py", "exact_checks.py"]
TESTS = Path(__file__).parent.parent


def run_checks(file: str, interpret: bool) -> None:
    """Run a file of `tests/` in a process of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if interpret else {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command.append(str(TESTS / file))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("file", CHECKS)
def test_kernels_agree_with_pytorch_in_the_interpreter(file: str) -> None:
    pytest.importorskip("triton")
    run_checks(f"engine/{file}", interpret=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("file", CHECKS)
def test_kernels_agree_with_pytorch_on_the_device(file: str) -> None:
    run_checks(f"engine/{file}", interpret=False)
