"""The learner's forward over flat tokens: no padding, and logits only of what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from upshot.engine.llama.attention import attend_by, over_tokens
from upshot.engine.llama.shape import causal_lm, configs_of
from upshot.training.learner.batch import ForwardOutput, TrainBatch
from upshot.training.learner.forward.attention import Attend, IndexedRows, PackedAttention
from upshot.training.learner.forward.logprobs import linear_logprobs
from upshot.training.learner.forward.padded import Forward, values_of


class HiddenStates(Protocol):
    """How the states that the head reads are computed."""

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[N, hidden] of flat tokens [N]."""
        ...


class PackedForward(Forward):
    """Flat tokens through `HiddenStates`, then the head where there is loss."""

    shares = True

    def __init__(self, module: Any, states: HiddenStates) -> None:
        self.lm = causal_lm(module)
        self.states = states
        config = self.lm.config.get_text_config()
        self.cap = float(getattr(config, "final_logit_softcapping", None) or 0)
        self.divisor = float(getattr(config, "logits_scaling", None) or 1)
        """What the model divides its logits by (Granite): a temperature of its own."""

    def read(
        self, batch: TrainBatch, temperature: float, entropy: bool = False, value_head: nn.Linear | None = None
    ) -> ForwardOutput:
        """See `Forward`."""
        hidden = self.rows(batch)
        head = self.lm.get_output_embeddings()
        logprobs, spread = linear_logprobs(hidden, head, batch.targets, temperature * self.divisor, entropy, self.cap)
        return ForwardOutput(logprobs, spread, None if value_head is None else values_of(hidden, value_head))

    def rows(self, batch: TrainBatch) -> Tensor:
        """[M, hidden] where the trained tokens are predicted."""
        attention = PackedAttention(batch.layout, batch.ids.device)
        states = self.states.hidden(batch.ids, batch.positions, attention.attend)
        return IndexedRows.apply(states, batch.rows) if batch.layout.shares else states.index_select(0, batch.rows)  # type: ignore[no-any-return]

    def open(self) -> AbstractContextManager[None]:
        """See `Forward`."""
        return self.states.open() if isinstance(self.states, ModuleHidden) else nullcontext()


class ModuleHidden:
    """transformers' own forward without the head, with our attention in it."""

    def __init__(self, module: Any) -> None:
        lm = causal_lm(module)
        self.core = lm.base_model
        if self.core is lm:
            raise NotImplementedError(f"{type(lm).__name__} has no part before its head")
        self.configs = configs_of(lm)
        self._attend: Attend | None = None
        """Of the last batch read: a checkpointed layer asks for it again in the backward pass."""

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `HiddenStates`."""
        self._attend = attend
        out = self.core(input_ids=ids[None], position_ids=positions[None], attention_mask=None, use_cache=False)
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside: the model attends over flat tokens."""
        before = self._attend
        try:
            with attend_by(over_tokens(lambda *call: self._attend(*call)), self.configs):  # type: ignore[misc]
                yield
        finally:
            self._attend = before
