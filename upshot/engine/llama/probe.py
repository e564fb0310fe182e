"""Does a driver compute what the model computes? A short prompt in two chunks, against the model's own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from upshot.core.errors import UserError
from upshot.engine.cpu.runner import DecodeStep, PrefillStep
from upshot.engine.cpu.store import Store
from upshot.engine.exact.forward import ExactForward
from upshot.engine.exact.step import ExactDriver, ExactStep
from upshot.engine.llama.attention import AttentionStep
from upshot.engine.llama.blocks import BlockDriver
from upshot.engine.llama.driver import Driver, causal_lm
from upshot.engine.scheduler import Chunk
from upshot.engine.sequence import Rules, Sequence

IDS = 12


def disagreement(
    model: torch.nn.Module, driver: Driver, driven: Callable[[Driver, list[int]], torch.Tensor] | None = None
) -> str | None:
    """None if the driver's logits agree with the model's; else what differs.

    `driven` computes the logits of the last three of some ids, read in chunks and one by one; default: on the CPU.
    """
    ids = [(7 * i + 3) % driver.shape.vocab for i in range(IDS)]
    with torch.inference_mode():
        try:
            expected, got = _both(model, driver, lambda: (driven or _driven)(driver, ids), ids)
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
    return compare(got, expected, driver)


def _both(
    model: torch.nn.Module, driver: Driver, driven: Callable[[], torch.Tensor], ids: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits expected of a driver and those it gives; where it merges adapters, it has no hand in the former."""
    if not isinstance(driver, BlockDriver) or not driver.weights.layers:
        with busy_adapters(model):
            return expected_logits(model, driver, ids), driven()
    # One that shares another model's weights would need a copy of its own as soon as its adapters had values.
    busy = nullcontext() if driver.weights.shares else busy_adapters(model)
    driver.release()
    try:
        with busy:
            expected = expected_logits(model, driver, ids)
            driver.take()
            try:
                return expected, driven()
            finally:
                driver.release()
    finally:
        driver.take()


@contextmanager
def busy_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Inside: adapters have values that change the logits.

    New ones add zeros or are copies of what they stand for, so a driver that leaves them out would seem to agree.
    """
    noise = torch.Generator().manual_seed(0)
    wrapped = hasattr(model, "peft_config")
    weights = [w for w in model.parameters() if w.requires_grad or not w.any()] if wrapped else []
    before = [w.data.clone() for w in weights]
    try:
        for weight in weights:
            scale = float(weight.data.float().square().mean().sqrt()) or 0.3
            weight.data.add_((torch.randn(weight.shape, generator=noise) * scale).to(weight.device, weight.dtype))
        yield
    finally:
        for weight, values in zip(weights, before, strict=True):
            weight.data.copy_(values)


def expected_logits(model: torch.nn.Module, driver: Driver, ids: list[int]) -> torch.Tensor:
    """The logits that a driver must give for the last ids: the model's own, or in exact mode the exact ones."""
    plain = plain_logits(model, torch.tensor(ids))
    if not isinstance(driver, ExactDriver):
        return plain
    forward = ExactForward(driver.mode.kernels)
    # The third of three rows: not where the driver computes them.
    rows = torch.tensor([ids[5:] + ids[:5], ids[::-1], ids])
    with forward.attention(model), forward.operations():
        exact = plain_logits(model, rows)
    reason = _gap(exact, plain, driver)
    if reason is not None:
        raise UserError(f"exact mode cannot drive {type(causal_lm(model)).__name__}: in exact operations its {reason}")
    return exact


def compare(got: torch.Tensor, expected: torch.Tensor, driver: Driver) -> str | None:
    """None if a driver's logits agree with the expected ones, as far as its dtype allows or bit for bit."""
    if isinstance(driver, ExactDriver):
        wrong = int((got != expected).sum())
        return f"{wrong} of {got.numel()} logits are not bitwise the learner's" if wrong else None
    return _gap(got, expected, driver)


def _gap(got: torch.Tensor, expected: torch.Tensor, driver: Driver) -> str | None:
    gap = float((got.float() - expected.float()).norm() / (expected.float().norm() + 1e-6))
    # Random weights in bfloat16 are already 5 % from float32; a wrong layer is off by more than half.
    limit = 1e-3 if driver.shape.dtype == torch.float32 else 0.2
    if gap <= limit:
        return None
    config = driver.lm.config.get_text_config()
    capped = getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa"
    hint = "; sdpa leaves out this model's soft cap: load it with attn_implementation='eager'" if capped else ""
    return f"logits differ from the model's own forward by {gap:.2g} of their size{hint}"


def plain_logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The model's own logits of the last three ids of one row, or of the last row, on the CPU."""
    loud = [m for m in model.modules() if m.training]  # attention dropout follows its module's own mode
    for module in loud:
        module.training = False
    try:
        lm = causal_lm(model)
        ids = torch.atleast_2d(ids).to(lm.get_input_embeddings().weight.device)
        return lm(input_ids=ids, use_cache=False).logits[-1, -3:].cpu()
    finally:
        for module in loud:
            module.training = True


def _driven(driver: Driver, ids: list[int]) -> torch.Tensor:
    """Logits of the last three ids: two chunks of the prompt, then one id at a time."""
    shape = driver.shape
    seq = Sequence(list(ids), Rules(), pages=list(range(1, 5)))
    store = Store(shape.layers, 5, 4, shape.kv_heads, shape.head_dim, shape.dtype)
    rows = []
    exact = isinstance(driver, ExactDriver)
    step: AttentionStep
    for start, stop in ((0, 5), (5, IDS - 2)):
        step = ExactStep(store, [(seq, start, stop)]) if exact else PrefillStep(store, [Chunk(seq, start, stop, [])])
        rows.append(
            driver.logits(
                torch.tensor(ids[start:stop]), torch.arange(start, stop), step, torch.tensor([stop - start - 1])
            )
        )
    for position in range(IDS - 2, IDS):
        at = torch.tensor([position])
        step = (
            ExactStep(store, [(seq, position, position + 1)]) if exact else DecodeStep(store, None, [seq], at.numpy())
        )
        rows.append(driver.logits(torch.tensor([ids[position]]), at, step, torch.tensor([0])))
    return torch.cat(rows[1:])
