"""A share of a GPU is reserved before the weights are loaded, and the rest of it is used for pages. The GPU is
simulated."""

from __future__ import annotations

import pytest

from upshot.cli import main
from upshot.core.errors import UserError
from upshot.serving.openai.allowance import Allowance

GIB = 2**30


def test_a_share_is_held_and_what_the_weights_leave_goes_to_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[int, float] = {}
    used = 10 * GIB
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda share, gpu: held.update({gpu: share}))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: (70 * GIB, 80 * GIB))
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda gpu: used)
    allowance = Allowance.hold(0.25, "cuda")
    assert held == {0: 0.25} and allowance.bytes == 20 * GIB
    assert allowance.kv_bytes() == int(8.5 * GIB)
    used = 21 * GIB
    with pytest.raises(UserError, match=r"--memory 0.25 is 20.0 GiB, and the weights are 21.0 GiB"):
        allowance.kv_bytes()


def test_a_share_without_a_gpu_and_an_invalid_share_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="the device is cpu; try --kv-gib"):
        Allowance.hold(0.5, "cpu")
    with pytest.raises(UserError, match="above 0 and at most 1"):
        Allowance.hold(1.5, "cuda")
    assert main(["serve", "smollm2-135m", "--memory", "0.5", "--kv-gib", "1"]) == 2
    assert "give only one" in capsys.readouterr().err
