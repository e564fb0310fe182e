"""The optimizer's options, 8-bit moments and state on the host, train like the plain optimizer."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.workshop import adam_config
from upshot.training.learner.optim.adamw import MasterAdamW
from upshot.training.learner.optim.adamw_8bit import BLOCK, EightBitTensor

WAYS: dict[str, dict[str, bool]] = {
    "8 bits": {"small": True},
    "host": {"offload": True},
    "both": {"small": True, "offload": True},
}


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 1)).to(dtype)


def trained(dtype: torch.dtype, steps: int, **options: bool) -> tuple[float, nn.Module, MasterAdamW]:
    """The loss after some steps on a fixed problem."""
    net = model(dtype)
    optimizer = MasterAdamW(list(net.parameters()), 1e-2, adam_config(0.01, **options))
    return run(net, optimizer, steps), net, optimizer


def run(net: nn.Module, optimizer: MasterAdamW, steps: int) -> float:
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(1))
    y = x[:, :1] * 2 - x[:, 1:2]
    loss = torch.zeros(())
    for _ in range(steps):
        for part in (slice(0, 32), slice(32, 64)):
            out = net(x[part].to(next(net.parameters()).dtype)).float()
            loss = (out - y[part]).square().mean() / 2
            loss.backward()
            optimizer.gather()
        optimizer.step(1e-2)
        optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bit_moments_learn_what_plain_ones_learn(way: str, dtype: torch.dtype) -> None:
    plain, _, _ = trained(dtype, 60)
    found, net, _ = trained(dtype, 60, **WAYS[way])
    start, _, _ = trained(dtype, 1)
    assert found < 0.2 * start and abs(found - plain) < 0.05 * start
    assert all(p.dtype == dtype for p in net.parameters())


def test_on_the_host_it_takes_exactly_the_same_steps() -> None:
    _, plain, _ = trained(torch.bfloat16, 5)
    _, hosted, optimizer = trained(torch.bfloat16, 5, offload=True)
    for a, b in zip(plain.parameters(), hosted.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(master.device.type == "cpu" for master in optimizer.masters)


@pytest.mark.parametrize("way", ["plain", *WAYS])
def test_saving_and_restoring_do_not_change_its_steps(way: str) -> None:
    options = WAYS.get(way, {})
    _, straight, _ = trained(torch.bfloat16, 6, **options)
    _, net, optimizer = trained(torch.bfloat16, 3, **options)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = MasterAdamW(list(net.parameters()), 1e-2, adam_config(0.01, **options))
    again.load_state_dict(torch.load(file, weights_only=True))
    run(net, again, 3)
    for a, b in zip(straight.parameters(), net.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_can_move_its_state_to_the_host_and_back() -> None:
    _, straight, _ = trained(torch.float32, 6)
    _, net, optimizer = trained(torch.float32, 3)
    hosted = MasterAdamW(list(net.parameters()), 1e-2, adam_config(0.01, offload=True))
    hosted.load_state_dict(optimizer.state_dict())
    run(net, hosted, 1)
    back = MasterAdamW(list(net.parameters()), 1e-2, adam_config(0.01))
    back.load_state_dict(hosted.state_dict())
    run(net, back, 2)
    for a, b in zip(straight.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_state_of_other_weights_is_refused() -> None:
    _, _, optimizer = trained(torch.float32, 1)
    other = MasterAdamW([nn.Parameter(torch.ones(3, 2))], 1e-2, adam_config(0.01))
    with pytest.raises(ValueError, match="other weights"):
        other.load_state_dict(optimizer.state_dict())


def test_eight_bits_keep_every_number_to_a_sixteenth_whatever_its_block_holds() -> None:
    numbers = torch.cat([torch.logspace(-5, 0, 300), torch.zeros(7), torch.logspace(-12, -7, 300)])
    small = EightBitTensor.zeros(len(numbers), torch.device("cpu"), floor=True)
    small.write(0, numbers)
    read = small.read(0, len(numbers))
    within = [slice(i, min(i + BLOCK, len(numbers))) for i in range(0, len(numbers), BLOCK)]
    for block in within:
        top = numbers[block].max()
        held = numbers[block] > top * 2**-14
        torch.testing.assert_close(read[block][held], numbers[block][held], rtol=1 / 15, atol=0)
    assert bool((read[numbers > 0] > 0).all()), "no variance becomes none"
    assert bool((read[numbers == 0] == 0).all())


def state_bytes(optimizer: MasterAdamW) -> int:
    def size(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return sum(map(size, inner))

    return size(optimizer.state_dict()["adam"])


def test_eight_bits_are_a_quarter_of_the_state() -> None:
    wide = [nn.Parameter(torch.ones(64, 256))]
    wide[0].grad = torch.ones(64, 256)
    plain, small = (MasterAdamW(wide, 1e-3, adam_config(0.0, small=small)) for small in (False, True))
    for optimizer in (plain, small):
        optimizer.step(1e-3)
    assert state_bytes(small) < 0.26 * state_bytes(plain)
