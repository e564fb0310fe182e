"""Four verbs between the loops and the hardware: forward_backward, step, save, load."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from upshot.config.recipe import TrainConfig
from upshot.core.errors import UserError
from upshot.engine.kernels.plain import choose_attention_without_cudnn
from upshot.engine.llama.driver import training_mode
from upshot.models.local import DAMAGED, describe_damage
from upshot.training.learner.batch import Datum, ForwardOutput, micro_batches, pack, unpack, worth_sharing
from upshot.training.learner.distributed.ranks import ALONE, Ranks, shares, sum_by_name
from upshot.training.learner.forward.packed import without_dropout
from upshot.training.learner.forward.padded import Forward
from upshot.training.learner.forward.select import forward_of
from upshot.training.learner.optim.adamw import MasterAdamW
from upshot.training.learner.optim.zero import ShardedAdamW
from upshot.training.learner.snapshot import snapshot
from upshot.training.objectives.objectives import Logs, Objective

Unit = TypeVar("Unit", bound=Sequence[Datum])
SEQUENCES, TOKENS = "train/sequences", "train/tokens"
"""How it is logged what was learned from: sequences, and trained tokens in them."""


class Learner:
    """Trains any transformers causal LM in place; the sampler uses the same tensors."""

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        config: TrainConfig,
        max_tokens: int = 1,
        temperature: float = 1.0,
        changed: Callable[[], object] = lambda: None,
        value_head: bool = False,
        exact: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self.module = module.eval()
        self._modules = [*module.modules()]
        """A list, since with adapters a model has thousands of modules, and finding them takes milliseconds."""
        module.zero_grad(set_to_none=True)  # gradients that a caller left would be added to the first step's
        self.tokenizer = tokenizer
        self.config = config
        self.max_tokens = max_tokens
        """The constant of the length normalisation 'constant'."""
        self.temperature = temperature
        """Log-probabilities are those of softmax(logits / temperature), as the sampler reports them."""
        self.changed = changed
        """Called after every optimizer step: the weights are new."""
        if module.device.type == "cuda":
            torch.cuda.set_device(module.device)  # kernels are launched on the current one
        choose_attention_without_cudnn()
        self.exact = exact
        self.forward: Forward = forward_of(module, exact)
        """With `exact` it computes log-probabilities bit for bit as an exact engine does."""
        self.steps = 0
        """Updates, counting those that were left out because a step had too little data; the schedule follows them."""
        self.read = 0
        """Tokens that went through forward and backward, context included."""
        self.trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        """Of the model: all weights, or those of its adapters."""
        self.parameters = list(self.trained.values())
        self.value_head: nn.Linear | None = None
        if value_head:
            self.value_head = nn.Linear(module.config.get_text_config().hidden_size, 1).to(module.device)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
            self.parameters += list(self.value_head.parameters())
        self.ranks = ranks
        """Each reads and learns its share of the data; weights and logs are those of all."""
        ranks.barrier("learner")
        adam = partial(MasterAdamW, lr=config.lr, config=config.optimizer)
        self.optimizer = ShardedAdamW(self.parameters, ranks, adam) if ranks.size > 1 else adam(self.parameters)
        self.reference: dict[str, Tensor] = {}
        """What the trained weights were, by name, when the reference was kept."""
        self._rng: dict[str, Any] | None = None
        """The random states before the gradient under way: a checkpoint is of the last optimizer step."""

    def keep_reference(self, start: Mapping[str, Tensor] | None = None) -> None:
        """The reference is the model with these trained weights, or with those it has now. Nothing else is kept."""
        weights = {name: p.detach().clone() for name, p in self.trained.items()} if start is None else start
        self.reference = {name: weights[name].detach().to(p.device, p.dtype) for name, p in self.trained.items()}

    def logprobs(self, data: Sequence[Datum], reference: bool = False) -> list[list[float]]:
        """Log-probabilities of the trained tokens beside the ids, 0 elsewhere; of the policy or the reference."""
        with self._as_reference() if reference else nullcontext():
            return self._read(data, lambda output: output.logprobs)

    def values(self, data: Sequence[Datum]) -> list[list[float]]:
        """The value head's estimate before each trained token of the data."""
        return self._read(data, lambda output: output.values, self.value_head)

    def forward_backward(self, units: Sequence[Sequence[Datum]], objective: Objective) -> dict[str, float]:
        """Accumulate the gradient of the objective over all units; what to log."""
        data = list(chain.from_iterable(units))
        sequences = [datum.array for datum in data]
        self.read += sum(map(len, sequences))
        objective.begin(data, self.max_tokens, self.config.length_norm)
        logs: Logs = {}
        self._rng = self._rng or random_states()
        # Replies that share a beginning would share its noise.
        share = self.forward.shares and not objective.dropout and worth_sharing(sequences)
        mode = partial(training_mode, on=True) if objective.dropout else without_dropout
        with mode(self._modules), self.forward.open():
            chunks = micro_batches(self._share(units), self.config.token_budget, share)
            most = max(self.ranks.all_gather_object("chunks", len(chunks)))
            for chunk in chunks:
                batch = pack(chunk, self.module.device, share)
                head = self.value_head if objective.needs_values else None
                output = self.forward.read(batch, self.temperature, objective.needs_entropy, head)
                loss, more = objective.loss(batch, output)
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.gather()
                for name, value in more.items():
                    logs[name] = logs[name] + value if name in logs else value
            for _ in range(most - len(chunks)):  # others still have gradients to sum
                self.optimizer.gather()
        gc.collect(0)  # while the device computes; otherwise it would interrupt the next replies
        logs_of_rank = dict(zip(logs, torch.stack([*logs.values()]).tolist(), strict=True)) if logs else {}
        counts = {SEQUENCES: float(len(data)), TOKENS: float(objective.tokens)}
        return sum_by_name(self.ranks.all_gather_object("logs", logs_of_rank)) | counts

    def step(self) -> dict[str, float]:
        """Clip the gradient, take one optimizer step, tell the sampler."""
        norm = self.optimizer.clip(self.config.optimizer.grad_clip)
        lr = learning_rate(self.config, self.steps)
        if math.isfinite(norm):
            self.optimizer.step(lr)
        self.optimizer.zero_grad()
        self.steps += 1
        self._rng = None
        self.changed()
        return {"train/grad_norm": norm, "train/lr": lr, "train/skipped": float(not math.isfinite(norm))}

    def save(self, folder: Path) -> None:
        """Weights and tokenizer as a Hugging Face folder, and beside them what an exact resume needs."""
        self.snapshot()(folder)

    def snapshot(self) -> Callable[[Path], None]:
        """What `save` writes, copied to the host: a thread may write it while training goes on."""
        random = self._rng or random_states()
        state = {
            "steps": self.steps,
            "optimizer": self.optimizer.state_dict(),
            "forward": self.forward.name,
            **random,
            "other_ranks": self.ranks.all_gather_object("random", random)[1:],
            "value_head": self.value_head.state_dict() if self.value_head is not None else None,
        }
        return snapshot(self.module, self.tokenizer, state, "learner.pt") if self.ranks.first else lambda folder: None

    def load(self, folder: Path) -> None:
        """Optimizer, schedule and random states; the weights are loaded with the model itself."""
        try:
            state = torch.load(folder / "learner.pt", map_location="cpu", weights_only=True)
            self.steps = state["steps"]
            self.optimizer.load_state_dict(state["optimizer"])
        except DAMAGED as error:
            raise UserError(
                f"'{folder / 'learner.pt'}' is damaged or belongs to another model ({describe_damage(error)}); "
                f"delete the folder {folder.name}, then --resume continues from the checkpoint before it"
            ) from error
        self.forward = forward_of(self.module, self.exact, state.get("forward", self.forward.name))
        states_of_rank = [state, *state.get("other_ranks", ())][self.ranks.rank : self.ranks.rank + 1]
        for random in states_of_rank:  # none where the checkpoint is of fewer ranks
            torch.set_rng_state(random["torch_rng"])
            if random["cuda_rng"] and torch.cuda.is_available():
                torch.cuda.set_rng_state_all(random["cuda_rng"])
        if self.value_head is not None and state["value_head"] is not None:
            self.value_head.load_state_dict(state["value_head"])

    def _read(
        self, data: Sequence[Datum], column: Callable[[ForwardOutput], Tensor | None], head: nn.Linear | None = None
    ) -> list[list[float]]:
        """A column of what the model says of the data, beside each datum's ids."""
        rows: dict[int, list[float]] = {}
        units = self._share([[datum] for datum in data])
        share = self.forward.shares and worth_sharing([datum.array for datum in data])
        with torch.no_grad(), training_mode(self._modules, False), self.forward.open():
            for chunk in micro_batches(units, self.config.token_budget, share):
                batch = pack(chunk, self.module.device, share)
                values = column(self.forward.read(batch, self.temperature, value_head=head))
                assert values is not None
                rows |= {id(d): row for d, row in zip(chunk, unpack(chunk, values), strict=True)}
        rows_of_rank = [rows[id(datum)] for (datum,) in units]
        return [row for part in self.ranks.all_gather_object("read", rows_of_rank) for row in part]

    def _share(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """This rank's part of what there is to learn or read."""
        if self.ranks.size == 1:
            return units
        sizes = [sum(len(datum.ids) for datum in unit) for unit in units]
        share = shares(sizes, self.ranks.size)[self.ranks.rank]
        return units[share.start : share.stop]

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """The reference's weights in the model's place: tensors change hands, nothing is copied."""
        if not self.reference:
            raise RuntimeError("keep_reference() was not called")
        trained = {name: p.data for name, p in self.trained.items()}
        try:
            for name, parameter in self.trained.items():
                parameter.data = self.reference[name]
            yield
        finally:
            for name, parameter in self.trained.items():
                parameter.data = trained[name]


def random_states() -> dict[str, Any]:
    """The states of torch's random streams."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch_rng": torch.get_rng_state(), "cuda_rng": cuda}


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of a step (counted from 0): linear warm-up, then constant, cosine or linear to lr × min_lr."""
    updates, warmup = config.steps * config.minibatches, config.schedule.warmup_steps
    warmup = math.ceil(warmup * updates if warmup < 1 else warmup)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule.name == "constant":
        return config.lr
    done = min((step - warmup) / max(updates - warmup, 1), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule.name == "cosine" else 1 - done
    return config.lr * (config.schedule.min_lr + (1 - config.schedule.min_lr) * left)


def all_finite(weights: Sequence[torch.Tensor]) -> bool:
    """Whether no weight is NaN or infinite."""
    return not weights or bool(torch.stack([weight.detach().isfinite().all() for weight in weights]).all())
