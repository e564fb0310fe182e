"""The learner's Triton kernels are right: by Triton's interpreter here, and on the device where there is one.

The interpreter is chosen when Triton is first imported, which other tests may have done: so a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from upshot.engine.kernels.launch import Launcher

CHECKS = ["block_kernel_checks.py", "logprob_kernel_checks.py"]


def run_checks(file: str, interpret: bool) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if interpret else {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command.append(str(Path(__file__).with_name(file)))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("file", CHECKS)
def test_kernels_agree_with_pytorch_in_the_interpreter(file: str) -> None:
    pytest.importorskip("triton")
    run_checks(file, interpret=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("file", CHECKS)
def test_kernels_agree_with_pytorch_on_the_device(file: str) -> None:
    run_checks(file, interpret=False)


class Told:
    """Stands for a kernel and for its compiled forms: writes down which was launched, and with what."""

    def __init__(self, launches: list[tuple[str, Any]], name: str) -> None:
        self.launches, self.name = launches, name

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> Told:
            self.launches.append((self.name, arguments))
            return Told(self.launches, f"form {len(self.launches)}")

        return launch


def test_a_compiled_kernel_is_launched_again_only_for_what_it_was_compiled_for() -> None:
    launches: list[tuple[str, Any]] = []
    launch = Launcher(Told(launches, "kernel"))
    x = torch.zeros(32)
    for tensor, constants in [(x, (1,)), (x[16:], (1,)), (x, (2,)), (x.half(), (1,)), (x[1:], (1,)), (x[1:], (1,))]:
        launch((3, 1, 1), (tensor,), (0.5,), constants, 4)
    assert [name for name, _ in launches] == ["kernel", "form 1", "kernel", "kernel", "kernel", "kernel"]
    assert launches[1][1][1:] == (0.5, 1)
