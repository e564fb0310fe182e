"""Does a driver compute what the model computes? A short prompt in two chunks, against the model's own forward."""

from __future__ import annotations

import torch

from upshot.engine.driver import Driver, causal_lm
from upshot.engine.scheduler import Chunk
from upshot.engine.sequence import Rules, Sequence
from upshot.engine.store import Store
from upshot.engine.torch_runner import DecodeStep, PrefillStep

IDS = 12


def disagreement(model: torch.nn.Module, driver: Driver) -> str | None:
    """None if the driver's logits agree with the model's; else what differs."""
    shape = driver.shape
    ids = [(7 * i + 3) % shape.vocab for i in range(IDS)]
    with torch.inference_mode():
        expected = plain_logits(model, torch.tensor(ids))
        try:
            got = _driven(driver, ids)
        except (
            NotImplementedError,
            AttributeError,
            TypeError,
            ValueError,
            KeyError,
            RuntimeError,
            IndexError,
        ) as error:
            return f"{type(error).__name__}: {error}"
    return compare(got, expected, shape.dtype)


def compare(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str | None:
    """None if two sets of logits agree as far as the dtype allows."""
    gap = float((got.float() - expected.float()).norm() / (expected.float().norm() + 1e-6))
    # Random weights in bfloat16 are already 5 % from float32; a wrong layer is off by more than half.
    limit = 1e-3 if dtype == torch.float32 else 0.2
    return None if gap <= limit else f"logits differ from the model's own forward by {gap:.2g} of their size"


def plain_logits(model: torch.nn.Module, ids: torch.Tensor, last: int = 3) -> torch.Tensor:
    """The model's own logits of the last ids (0: all), on the CPU."""
    loud = [m for m in model.modules() if m.training]  # attention dropout follows its module's own mode
    for module in loud:
        module.training = False
    try:
        lm = causal_lm(model)
        return (
            lm(input_ids=ids[None].to(lm.get_input_embeddings().weight.device), use_cache=False).logits[0, -last:].cpu()
        )
    finally:
        for module in loud:
            module.training = True


def _driven(driver: Driver, ids: list[int]) -> torch.Tensor:
    """Logits of the last three ids: two chunks of the prompt, then one id at a time."""
    shape = driver.shape
    seq = Sequence(list(ids), Rules(), pages=list(range(1, 5)))
    store = Store(shape.layers, 5, 4, shape.kv_heads, shape.head_dim, shape.dtype)
    rows = []
    for start, stop in ((0, 5), (5, IDS - 2)):
        step = PrefillStep(store, [Chunk(seq, start, stop, [])])
        rows.append(
            driver.logits(torch.tensor(ids[start:stop]), step.positions, step, torch.tensor([stop - start - 1]))
        )
    for position in range(IDS - 2, IDS):
        step_one = DecodeStep(store, None, [seq], torch.tensor([position]).numpy())
        rows.append(driver.logits(torch.tensor([ids[position]]), step_one.positions, step_one, torch.tensor([0])))
    return torch.cat(rows[1:])
