"""Which forward a learner reads batches with: the leanest one with the model's own log-probabilities and gradients.

A forward is tried on short and long sequences of which some begin alike, as they are in training: packed in every way
it may be given them. What it says, and the gradient of every trained weight, is compared with transformers' own forward
of each sequence by itself, which has neither padding nor neighbours.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from upshot.core.errors import UserError
from upshot.engine.exact.forward import ExactForward
from upshot.engine.llama.agreement import FAILURES, block_alone, busy_adapters, other_mixing
from upshot.engine.llama.block import has_derivative
from upshot.engine.llama.driver import training_mode
from upshot.engine.llama.shape import causal_lm
from upshot.training.learner.batch import Datum, pack
from upshot.training.learner.forward.lean import Checkpointing, LeanForward
from upshot.training.learner.forward.packed import HiddenStates, ModuleHidden, PackedForward, without_dropout
from upshot.training.learner.forward.padded import Forward, PaddedForward, token_logprobs

LENGTHS = (30, 21, 3)
"""Of the sequences that a forward is tried on; the second begins like the first."""
ALIKE = 18
"""Ids that those two begin with."""


def forward_of(module: Any, exact: bool = False, chosen: str = "") -> Forward:
    """The forward that suits a model; in exact mode the padded one, in exact operations. `UserError` if none does.

    chosen: the name of the one that the run began with. Rounding decides where two are close, and the weights have
    changed since: a resumed run that tried them again might read with another one.
    """
    name, reasons = type(causal_lm(module)).__name__, list[str]()
    makers = forwards_of(module, exact)
    if again := [make for make in makers if make.__name__ == chosen]:
        return again[0]()
    with at_rest(module), busy_adapters(module):
        data = sample_data(causal_lm(module))
        expected = measure_alone(module, data)
        for make in makers:
            try:
                reason = disagreement(module, make, data, expected)
            except torch.OutOfMemoryError:
                raise  # a slower forward takes more
            except FAILURES as error:
                reason = f"{type(error).__name__}: {error}"
            if reason is None:
                forward = make()
                break
            reasons.append(f"{make.__name__}: {reason}")
    for reason in reasons[: len(makers) - 1]:
        warnings.warn(f"the learner falls back to a slower forward: {reason}", stacklevel=2)
    if len(reasons) == len(makers):
        raise UserError(f"{name} cannot be trained: no forward agrees with the model's own ({'; '.join(reasons)})")
    return forward


def forwards_of(module: Any, exact: bool) -> list[Callable[[], Forward]]:
    """What may read batches with a model, the leanest first; the last takes what the others refuse."""

    def padded() -> Forward:
        return PaddedForward(module, ExactForward(kernels=module.device.type == "cuda") if exact else None)

    def packed(states: Callable[[], HiddenStates]) -> Callable[[], Forward]:
        def make() -> Forward:
            return PackedForward(module, states(), states.__name__)

        make.__name__ = states.__name__
        return make

    return [padded] if exact else [*map(packed, states_of(module)), padded]


def states_of(module: Any) -> list[Callable[[], HiddenStates]]:
    """What may compute a model's hidden states from flat tokens, the leanest first."""

    def lean() -> HiddenStates:
        return LeanForward(module, *checkpointing_of(module))

    def transformers() -> HiddenStates:
        if reason := other_mixing(module):
            raise NotImplementedError(reason)
        return ModuleHidden(module)

    return [lean, transformers] if is_lean(module) else [transformers]


def checkpointing_of(module: Any) -> tuple[Checkpointing, int | None]:
    """What a model recomputes in the backward pass, and in how many of its first layers (`set_checkpointing`)."""
    lm = causal_lm(module)
    kind: Checkpointing
    kind, layers = getattr(lm, "recomputed", ("none", None))
    if lm.is_gradient_checkpointing != (kind == "block"):  # set by transformers' own methods
        return ("block", None) if lm.is_gradient_checkpointing else ("none", None)
    return kind, layers


def set_checkpointing(module: Any, kind: Checkpointing, layers: int | None = None) -> None:
    """Choose what a model computes again, in its first `layers` layers (None: in all).

    transformers knows only `block` in all layers, so a mark on the model says the rest; its own forward ignores it.
    """
    lm = causal_lm(module)
    lm.recomputed = kind, layers
    if kind == "block":
        lm.gradient_checkpointing_enable()
    elif lm.is_gradient_checkpointing:
        lm.gradient_checkpointing_disable()


def is_lean(module: Any) -> bool:
    """Whether the learner has a block of its own for a model; it draws no dropout."""
    config = causal_lm(module).config.get_text_config()
    drops = getattr(config, "attention_dropout", 0) or getattr(config, "resid_pdrop", 0)
    return has_derivative(module) and not drops


@dataclass(frozen=True)
class Measured:
    """What a forward says of some sequences."""

    logprobs: Tensor
    """Of all their tokens but the first ones."""
    gradients: dict[str, Tensor]
    """Of every trained weight, its last dimension summed with random signs: as long as the gradient itself in the
    mean, and small enough to be kept for a large model."""


def sample_data(lm: Any) -> list[Datum]:
    """Sequences to try a forward on, the longest within the model's positions."""
    vocab = lm.get_output_embeddings().weight.shape[0]
    most = int(getattr(lm.config.get_text_config(), "max_position_embeddings", 0) or LENGTHS[0])
    rows = [[(7 * i + 11 * row + 3) % vocab for i in range(length)] for row, length in enumerate(LENGTHS)]
    rows[1][:ALIKE] = rows[0][:ALIKE]
    return [Datum(ids, [0, *[1] * (len(ids) - 1)]) for ids in (row[:most] for row in rows)]


def measure_alone(module: Any, data: list[Datum]) -> Measured:
    """The model's own forward of each sequence by itself."""

    def read(datum: Datum) -> Tensor:
        ids = torch.tensor([datum.ids], device=module.device)
        return token_logprobs(module(input_ids=ids, use_cache=False).logits, ids)[0, 1:]

    with training_mode(module.modules(), False):
        return _measure(module, lambda: torch.cat([read(datum) for datum in data]))


def disagreement(
    module: Any, make: Callable[[], Forward], data: list[Datum], expected: Measured, whole: bool = True
) -> str | None:
    """None if log-probabilities and gradients agree with those of each sequence by itself; else what differs.

    Where in 16 bits the gradients of the `whole` differ, those of each block by itself decide: adapters on real weights
    (SmolLM2) were off by 0.7 of their size, by rounding alone.
    """
    forward, half = make(), causal_lm(module).get_input_embeddings().weight.dtype != torch.float32
    limit, single = (0.2, 0.5) if half else (1e-3, 1e-3)
    for share in (True, False) if forward.shares else (False,):
        with without_dropout([*module.modules()]), forward.open():
            batch = pack(data, module.device, share)
            measured = _measure(module, lambda batch=batch: forward.read(batch, 1.0).logprobs)  # type: ignore[misc]
        gap = float((measured.logprobs - expected.logprobs).norm() / (expected.logprobs.norm() + 1e-6))
        if not gap <= limit:
            return f"logits differ from the model's own forward: log-probabilities by {gap:.2g} of their size"
        if reason := gradient_gap(measured.gradients, expected.gradients, limit, single):
            core = getattr(causal_lm(module), "model", None)
            return _gap_of_blocks(module, make, data) if half and whole and hasattr(core, "layers") else reason
    return None


def _gap_of_blocks(module: Any, make: Callable[[], Forward], data: list[Datum]) -> str | None:
    """None if every block by itself agrees with the model's own; else what differs."""
    core = causal_lm(module).model
    for index in range(len(core.layers)):
        with block_alone(core, index):
            reason = disagreement(module, make, data, measure_alone(module, data), whole=False)
        if reason:
            return f"block {index}: {reason}"
    return None


def gradient_gap(measured: dict[str, Tensor], expected: dict[str, Tensor], limit: float, single: float) -> str | None:
    """None if no kind of weight's gradients are off by more than `limit` of their size, no one by `single`; else which.

    A kind is a weight in all layers. Rounding in bfloat16 is 4 % of a gradient in 32 layers of random weights in the
    mean, but one of four hundred adapters was off by 21 % by chance; a wrong forward is wrong for a kind. So half of a
    single gradient may differ in bfloat16 (a wrong layer's differs by more), and a fifth of a kind's (state that leaks
    from one short sequence into the next: a third).
    """
    if measured.keys() != expected.keys():
        return f"no gradient of {', '.join(sorted(expected.keys() ^ measured.keys())[:3])}"
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    # Some gradients are zero but for rounding (a key's bias): what is small beside the others may differ.
    small = 0.01 * max(norms.values(), default=0.0) + 1e-9
    apart = {name: float((measured[name] - gradient).norm()) for name, gradient in expected.items()}
    kinds: dict[str, list[str]] = {}
    for name in norms:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    gaps = [(_gap(apart, norms, small, names) / limit, kind, limit) for kind, names in kinds.items()]
    gaps += [(_gap(apart, norms, small, [name]) / single, name, single) for name in norms]
    off = [gap for gap in gaps if not gap[0] <= 1]  # includes NaN
    if not off:
        return None
    worst, what, most = max(off)
    return f"the gradient of {what} differs from the model's own by {worst * most:.2g} of its size"


def _gap(apart: dict[str, float], norms: dict[str, float], small: float, names: Sequence[str]) -> float:
    return math.hypot(*(apart[name] for name in names)) / math.hypot(*(norms[name] + small for name in names))


def _measure(module: Any, read: Callable[[], Tensor]) -> Measured:
    """Log-probabilities, and the gradients of a sum in which each of them counts in its own way."""
    gradients: dict[str, Tensor] = {}
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]

    def take(name: str) -> Callable[[nn.Parameter], None]:
        def hook(parameter: nn.Parameter) -> None:  # one weight's gradient is there at a time
            assert parameter.grad is not None
            gradients[name] = _with_random_signs(parameter.grad)
            parameter.grad = None

        return hook

    hooks = [p.register_post_accumulate_grad_hook(take(name)) for name, p in trained]
    try:
        with torch.set_grad_enabled(bool(trained)):
            logprobs = read()
        if trained:
            weights = torch.arange(len(logprobs), device=logprobs.device).mul(1.7).cos()
            (logprobs * weights).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()
    return Measured(logprobs.detach(), gradients)


def _with_random_signs(grad: Tensor) -> Tensor:
    if grad.dim() < 2:
        return grad.float()
    noise = torch.Generator().manual_seed(grad.shape[-1])
    signs = torch.randint(0, 2, (grad.shape[-1],), generator=noise) * 2 - 1
    return (grad.flatten(0, -2) @ signs.to(grad.device, grad.dtype)).float()


@contextmanager
def at_rest(module: Any) -> Iterator[None]:
    """Afterwards every module is in the mode it was in, and no random number was drawn."""
    modes = [(part, part.training) for part in module.modules()]
    devices = [module.device] if module.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for part, training in modes:
            part.training = training
