"""How the learner reads a batch: a forward of the model that says what its trained tokens are worth. Here: padded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from upshot.engine.exact.forward import ExactForward
from upshot.training.learner.batch import ForwardOutput, TrainBatch


class Forward(ABC):
    """Reads batches with a model, for gradients or without."""

    name = "padded"
    """Which of the forwards of a model it is."""
    shares = False
    """Whether it reads batches whose sequences share what they begin with."""

    @abstractmethod
    def open(self) -> AbstractContextManager[None]:
        """Inside, batches may be read. Keep it open for the backward pass, which may compute again."""

    @abstractmethod
    def read(
        self, batch: TrainBatch, temperature: float, entropy: bool = False, value_head: nn.Linear | None = None
    ) -> ForwardOutput:
        """Log-probabilities of the trained tokens under softmax(logits / temperature), and what else is asked for."""


class PaddedForward(Forward):
    """The model's own forward over sequences padded on the right; in exact operations where they are asked for."""

    def __init__(self, module: Any, exact: ExactForward | None = None) -> None:
        self.module, self.exact = module, exact

    def read(
        self, batch: TrainBatch, temperature: float, entropy: bool = False, value_head: nn.Linear | None = None
    ) -> ForwardOutput:
        """See `Forward`."""
        ids = pad_sequence(batch.ids.split(batch.lengths), batch_first=True)
        attention = pad_sequence(
            [torch.ones_like(sequence) for sequence in batch.ids.split(batch.lengths)], batch_first=True
        )
        hidden = value_head is not None
        with nullcontext() if self.exact is None else self.exact.operations():
            out = self.module(input_ids=ids, attention_mask=attention, output_hidden_states=hidden, use_cache=False)
        places = self._padded_rows(batch, ids.shape[1])
        if self.exact is None:
            logprobs = token_logprobs(out.logits, ids, temperature)
        else:
            logprobs = self.exact.token_logprobs(out.logits, ids, temperature)
        return ForwardOutput(
            logprobs.flatten()[places + 1],
            entropies(out.logits.flatten(0, 1)[places], temperature) if entropy else None,
            None if value_head is None else values_of(out.hidden_states[-1].flatten(0, 1)[places], value_head),
        )

    def open(self) -> AbstractContextManager[None]:
        """See `Forward`."""
        return self.exact.attention(self.module) if self.exact is not None else nullcontext()

    def _padded_rows(self, batch: TrainBatch, width: int) -> Tensor:
        """Where the batch's rows are in the padded tensor."""
        lengths = torch.tensor(batch.lengths, device=batch.rows.device)
        return batch.rows + (width - lengths).cumsum(0).roll(1).index_fill(0, lengths.new_zeros(1), 0)[batch.owner]


def values_of(hidden: Tensor, head: nn.Linear) -> Tensor:
    """What the value head says where each token is predicted."""
    out: Tensor = head(hidden.to(head.weight.dtype))
    return out.squeeze(-1)


def token_logprobs(logits_B_T_V: Tensor, ids_B_T: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of every token given those before it; position 0, which nothing precedes, gets 0."""
    logits = logits_B_T_V[:, :-1].float()
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    picked = -F.cross_entropy(logits.flatten(0, 1), ids_B_T[:, 1:].flatten(), reduction="none")
    return F.pad(picked.view(ids_B_T.shape[0], -1), (1, 0))


def entropies(logits_M_V: Tensor, temperature: float) -> Tensor:
    """Entropy of softmax(logits / temperature), one a row."""
    logits = logits_M_V.float()
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
