"""Which forward a learner reads batches with: the leanest one that computes what the model computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from upshot.engine.exact.forward import ExactForward
from upshot.engine.kernels.plain import cap_logits
from upshot.engine.llama.agreement import FAILURES, busy_adapters, logits_gap, plain_logits
from upshot.engine.llama.block import is_block_family
from upshot.engine.llama.driver import causal_lm, out_of_training
from upshot.training.learner.batch import Datum, pack
from upshot.training.learner.forward.dropout import without_dropout
from upshot.training.learner.forward.lean import LeanForward
from upshot.training.learner.forward.packed import HiddenStates, ModuleHidden, PackedForward
from upshot.training.learner.forward.padded import Forward, PaddedForward

IDS = 22


def forward_of(module: Any, exact: bool = False) -> Forward:
    """The forward that suits a model; in exact mode the padded one, in exact operations."""
    if exact:
        return PaddedForward(module, ExactForward(kernels=module.device.type == "cuda"))
    for make in states_of(module):
        try:
            forward = PackedForward(module, make())
            reason = disagreement(module, forward)
        except torch.OutOfMemoryError:
            raise  # a slower forward takes more
        except FAILURES as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is None:
            rehearse(forward, module)
            return forward
        warnings.warn(f"the learner falls back to a slower forward: {make.__name__}: {reason}", stacklevel=2)
    return PaddedForward(module)


def rehearse(forward: PackedForward, module: Any) -> None:
    """On a GPU: one derivative of nothing, so that kernels are compiled before the first step waits for them."""
    if module.device.type != "cuda" or not any(parameter.requires_grad for parameter in module.parameters()):
        return
    data = [Datum(list(range(IDS)), [0, *[1] * (IDS - 1)]), Datum([*range(IDS - 2), 1, 1], [0, *[1] * (IDS - 1)])]
    training = module.training
    with without_dropout(module), forward.open():
        forward.read(pack(data, module.device, share=True), 1.0).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    module.train(training)
    module.zero_grad(set_to_none=True)


def states_of(module: Any) -> list[Callable[[], HiddenStates]]:
    """What may compute a model's hidden states, the leanest first."""

    def lean() -> HiddenStates:
        return LeanForward(module, "block" if causal_lm(module).is_gradient_checkpointing else "none")

    def transformers() -> HiddenStates:
        return ModuleHidden(module)

    config = causal_lm(module).config.get_text_config()
    # The lean block draws no dropout inside attention.
    known = is_block_family(module) and not getattr(config, "attention_dropout", 0)
    return [lean, transformers] if known else [transformers]


def disagreement(module: Any, forward: PackedForward) -> str | None:
    """None if the logits of flat tokens with a shared beginning agree with the model's own; else what differs."""
    lm = causal_lm(module)
    head = lm.get_output_embeddings()
    vocab = head.weight.shape[0]
    ids = [(7 * i + 3) % vocab for i in range(IDS)]
    other = [*ids[:18], *ids[5:8]]  # the first 16 ids are shared
    data = [Datum(other, [0, *[1] * (len(other) - 1)]), Datum(ids, [0] * IDS)]
    data[1].mask[-2:] = [1, 1]
    with out_of_training(module.modules()), torch.no_grad(), busy_adapters(module):
        expected = plain_logits(module, torch.tensor(ids))
        with forward.open():
            rows = forward.rows(pack(data, module.device, share=True))[-2:]
        got = cap_logits(head(rows).float(), forward.cap).cpu()
    return logits_gap(got, expected[-3:-1], lm.get_input_embeddings().weight.dtype)
