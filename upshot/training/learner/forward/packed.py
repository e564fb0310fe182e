"""The learner's forward over flat tokens: no padding, and logits only of what is trained.

Hidden states are computed by `lean.py`, or by transformers with our attention in it. The head takes their rows in
chunks, so that all logits are never there at once: product with the head, log-sum-exp and pick (and entropy) in one
pass over the logits; the backward recomputes the logits, which become their own gradients in place. The head comes last
in the forward and first in the backward, so the last chunk's logits are kept: that costs no memory at the peak, and if
one chunk holds all rows, nothing is computed twice. A frozen head is never recomputed: the gradient of a row's hidden
state is that of its log-probability, computed in the forward, times a number that is known in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from upshot.engine.kernels import plain
from upshot.engine.kernels.plain import cap_logits
from upshot.engine.llama.attention import attend_by, over_tokens
from upshot.engine.llama.driver import training_mode
from upshot.engine.llama.shape import causal_lm, configs_of
from upshot.training.learner.batch import ForwardOutput, TrainBatch
from upshot.training.learner.forward.attention import Attend, IndexedRows, PackedAttention
from upshot.training.learner.forward.padded import Forward, values_of

CHUNK_BYTES = 1 << 30
"""The most memory that a chunk's logits take: one chunk is there at a time."""


def kernels_for(x: Tensor) -> Any:
    """The functions of `plain` for the device of a tensor: Triton's on a GPU, PyTorch's own elsewhere."""
    if not x.is_cuda:
        return plain
    from upshot.engine.kernels import gpu

    return gpu


class HiddenStates(Protocol):
    """How the states that the head reads are computed."""

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[N, hidden] of flat tokens [N]."""
        ...


class PackedForward(Forward):
    """Flat tokens through `HiddenStates`, then the head where there is loss."""

    shares = True

    def __init__(self, module: Any, states: HiddenStates, name: str = "") -> None:
        self.lm = causal_lm(module)
        self.states, self.name = states, name
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


@contextmanager
def without_dropout(modules: Sequence[Any]) -> Iterator[None]:
    """Evaluation mode for forward and backward, in which gradient checkpointing still works.

    transformers checkpoints a layer only while that layer is in training mode. So such a layer is, but only until its
    own forward begins (and begins again, in the backward).
    """
    layers = [layer for layer in modules if vars(layer).get("gradient_checkpointing")]
    functions = [layer._gradient_checkpointing_func for layer in layers]
    with training_mode(modules, False), training_mode(layers, True):
        try:
            for layer, function in zip(layers, functions, strict=True):
                layer._gradient_checkpointing_func = _calm_layer(layer, function)
            yield
        finally:
            for layer, function in zip(layers, functions, strict=True):
                layer._gradient_checkpointing_func = function


def _calm_layer(layer: Any, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def call(forward: Callable[..., Any], *args: Any) -> Any:
        def calm(*inner: Any) -> Any:
            layer.training = False
            try:
                return forward(*inner)
            finally:
                layer.training = True

        return checkpoint(calm, *args)

    return call


def linear_logprobs(
    hidden: Tensor, head: Any, targets: Tensor, temperature: float = 1.0, entropy: bool = False, cap: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """log softmax(z / temperature) at the targets [M], float32, for z = head(hidden [M, h]); and entropies, if asked.

    `temperature` 0 counts as 1 (greedy sampling reports log-probabilities at 1). `cap` > 0: z is cap × tanh(z / cap).
    """
    if not len(hidden):
        return hidden.float().sum(-1), hidden.float().sum(-1) if entropy else None
    inverse = 1 / temperature if temperature else 1.0
    if not (type(head) is nn.Linear and head.bias is None and head.weight.is_floating_point()):
        return _by_module(hidden, head, targets, inverse, entropy, cap)  # more than a product with its weight
    logprobs, entropies = LinearLogprobs.apply(hidden, head.weight, targets, inverse, entropy, cap)
    return logprobs, entropies if entropy else None


def chunks(rows: int, vocab: int, size: int) -> list[slice]:
    """Slices of about equal length whose logits take at most `CHUNK_BYTES`."""
    most = max(CHUNK_BYTES // (vocab * size), 1)
    step = -(-rows // -(-rows // most))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


class LinearLogprobs(torch.autograd.Function):
    """See `linear_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, inverse: float, entropy: bool, cap: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (zeros unless asked for)."""
        kernels, parts = kernels_for(hidden), chunks(len(hidden), len(weight), hidden.element_size())
        columns = torch.zeros(3, len(hidden), dtype=torch.float32, device=hidden.device)
        frozen = ctx.needs_input_grad[0] and not ctx.needs_input_grad[1] and not entropy
        units = torch.empty_like(hidden) if frozen else None
        logits = hidden.new_empty(0)
        for part in parts:
            del logits
            logits = hidden[part] @ weight.t()
            columns[:, part] = torch.stack(kernels.token_logprobs(logits, targets[part], inverse, cap, entropy))
            if units is not None:
                ones = torch.ones_like(columns[0, part])
                kernels.token_logprobs_backward(
                    logits, targets[part], columns[1, part], columns[2, part], ones, None, inverse, cap
                )
                torch.mm(logits, weight, out=units[part])
        if units is not None:
            ctx.save_for_backward(units)
            return columns[0], columns[2]
        kept = logits if any(ctx.needs_input_grad[:2]) else hidden.new_empty(0)
        ctx.save_for_backward(hidden, weight, targets, columns[1], columns[2])
        ctx.kept, ctx.parts, ctx.options = kept, parts, (inverse, cap, entropy)
        return columns[0], columns[2]

    @staticmethod
    def backward(ctx: Any, grads: Tensor, entropy_grads: Tensor) -> Any:
        """Gradients of the hidden states and of the weight, the latter added up in float32."""
        if len(ctx.saved_tensors) == 1:  # the gradients of log-probabilities of a frozen head
            (units,) = ctx.saved_tensors
            return (units * grads[:, None]).to(units.dtype), None, None, None, None, None
        hidden, weight, targets, sums, entropy = ctx.saved_tensors
        inverse, cap, asked = ctx.options
        grads, entropy_grads = grads.contiguous(), entropy_grads.contiguous()
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight: Tensor | None = None
        logits, ctx.kept = ctx.kept, None
        for part in reversed(ctx.parts):
            if logits is None:
                logits = hidden[part] @ weight.t()
            spread = entropy_grads[part] if asked else None
            kernels_for(logits).token_logprobs_backward(
                logits, targets[part], sums[part], entropy[part], grads[part], spread, inverse, cap
            )
            if d_hidden is not None:
                torch.mm(logits, weight, out=d_hidden[part])
            if ctx.needs_input_grad[1]:
                more = logits.t() @ hidden[part]
                if len(ctx.parts) > 1:
                    d_weight = more.float() if d_weight is None else d_weight.add_(more)
                else:
                    d_weight = more
            logits = None
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None, None, None


def _by_module(
    hidden: Tensor, head: Any, targets: Tensor, inverse: float, entropy: bool, cap: float
) -> tuple[Tensor, Tensor | None]:
    """The same through a head that is a module of its own kind (an adapter on it, a bias): chunk by chunk, twice."""

    def chunk_logprobs(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        every = (cap_logits(head(rows).float(), cap) * inverse).log_softmax(-1)
        spread = -(every.exp() * every).sum(-1) if entropy else every.new_zeros(len(rows))
        return every.gather(-1, wanted[:, None])[:, 0], spread

    parts = chunks(len(hidden), vocabulary(head), 4)
    pieces = [checkpoint(chunk_logprobs, hidden[part], targets[part], use_reentrant=False) for part in parts]
    logprobs, entropies = (torch.cat(column) for column in zip(*pieces, strict=True))
    return logprobs, entropies if entropy else None


def vocabulary(head: Any) -> int:
    """How many logits a head gives."""
    return int(getattr(head, "out_features", 0) or head.weight.shape[0])
