"""How compiled kernels are launched; other tests in this folder check what they compute."""

from __future__ import annotations

from typing import Any

import torch

from upshot.engine.kernels.launch import Launcher


class RecordedKernel:
    """Stands for a kernel and its compiled forms; records which was launched, and with what."""

    def __init__(self, launches: list[tuple[str, Any]], name: str) -> None:
        self.launches, self.name = launches, name

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> RecordedKernel:
            self.launches.append((self.name, arguments))
            return RecordedKernel(self.launches, f"form {len(self.launches)}")

        return launch


def test_a_compiled_kernel_is_launched_again_only_for_what_it_was_compiled_for() -> None:
    launches: list[tuple[str, Any]] = []
    launch = Launcher(RecordedKernel(launches, "kernel"))
    x = torch.zeros(32)
    for tensor, constants in [(x, (1,)), (x[16:], (1,)), (x, (2,)), (x.half(), (1,)), (x[1:], (1,)), (x[1:], (1,))]:
        launch((3, 1, 1), (tensor,), (0.5,), constants, 4)
    assert [name for name, _ in launches] == ["kernel", "form 1", "kernel", "kernel", "kernel", "kernel"]
    assert launches[1][1][1:] == (0.5, 1)
