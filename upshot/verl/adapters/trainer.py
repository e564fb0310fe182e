"""verl's trainers, with local mode's own functions for rows and seeds, credit, advantages and importance.

One plays a step and then learns from it, the other plays ahead; both share a mixin over verl's own trainer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from upshot.core.errors import UserError
from upshot.rollout.blame import blame
from upshot.rollout.play import count_earlier
from upshot.run.folder import RunFolder
from upshot.training.learner.learner import learning_rate
from upshot.training.loops.dynamic_sampling import other_rows, replace_flat
from upshot.training.loops.evaluate import summarise_held_out
from upshot.training.loops.phase import pick
from upshot.training.loops.rl import measure, stop_if_missing
from upshot.training.snapshots import staleness
from upshot.verl.adapters.budget import find_budget
from upshot.verl.adapters.loop import recipe_here, recipe_path
from upshot.verl.adapters.phases import report_phases
from upshot.verl.adapters.replies import Groups, PlayedRollouts
from upshot.verl.recorder import StepRecorder, mark_own, rename_metrics
from upshot.verl.rows import AGENT
from upshot.verl.table import AHEAD
from upshot.verl.train_batch import BatchRow, LearnerInputs, teach
from upshot.verl.worker import RolloutWorker, describe_place


class LocalLearning(PPOTrainer):  # type: ignore[misc]
    """Makes a trainer of verl's learn from our replies; it comes before that trainer among the bases."""

    def __init__(self, config: Any) -> None:
        self.recipe = recipe_here()
        super().__init__(config)

    def _build_replay_buffer(self) -> PlayedRollouts:
        self.trainer_mode = "sync"  # with any other name, verl uses the asynchronous buffer and checkpoints
        alone = self.recipe.train.trains_every_fork
        self.replies = PlayedRollouts(super()._build_replay_buffer(), self._play_on, alone)
        return self.replies

    def on_init_end(self) -> None:
        """All is loaded."""
        super().on_init_end()
        # Never started: it only provides the metrics of replies and helpers.
        self.worker = RolloutWorker(self.recipe, self.tokenizer)
        task, renderer = self.worker.rows.task, self.worker.renderer
        self.recorder = StepRecorder(self.recipe, RunFolder(Path(recipe_path()).parent), task, renderer.pieces)
        self.recorder.begin(self.total_training_steps, self.global_steps)
        self._looked: dict[str, float] = {}
        """An evaluation of a step whose line is not written yet."""
        self._begun = False
        config = self.recipe.train.model_copy(update={"steps": self.total_training_steps})
        self._rate = learning_rate(config, self.global_steps * config.minibatches)
        """The learning rate of the next update; except for the first, verl reports it after the previous update."""

    def on_train_begin(self) -> None:
        """Make this process count minibatches in rows; verl counts them in prompts × replies."""
        super().on_train_begin()
        self.config.actor_rollout_ref.rollout.n = 1
        self._begun = True

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """Train a step and write its line, before verl saves it."""
        began = time.perf_counter()
        batch = super().step(metrics, timing_raw)
        took = time.perf_counter() - began
        timing = {**timing_raw, "step": took}
        super()._compute_metrics(batch, metrics, timing, self.global_steps, self.global_steps // self.steps_per_epoch)
        logs = {**rename_metrics(metrics), "time/step": took, "train/lr": self._rate}
        self._rate = float(metrics.get("actor/lr", self._rate))
        logs |= self.recorder.count(self.replies.counted, self.worker.services)
        budget = find_budget()
        spent, stopping = ray.get([budget.spent.remote(), budget.is_stopping.remote()])
        self.recorder.write_step(self.global_steps, logs, self.replies.groups["train"], spent)
        if stopping:
            self._save_checkpoint()
            raise UserError(f"stopped by a signal after step {self.global_steps}, which is saved")
        return batch

    def _compute_metrics(self, *_: Any, **__: Any) -> None:
        """Write only an evaluation; `step` computes and writes all other metrics."""
        if self._looked:
            self.recorder.write_evaluation(self.global_steps, self._looked)
            self._looked = {}

    def _save_checkpoint(self) -> None:
        self.recorder.save(self.global_steps, super()._save_checkpoint)

    def _play_on(self, groups: Groups) -> Groups:
        """Play other rows in place of groups that teach nothing, as `train.dynamic_sampling` says."""
        step, tried = self.global_steps - 1, {self._ids[place] for place in self._pick_rows()}
        for number in range(1, self.recipe.train.dynamic_sampling + 1):
            items = other_rows(groups, self._ids, tried, step, number, self.recipe.seed)
            if not items:
                break
            batch = self._rows(items, number)
            tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
            self._submit_batch_to_rollout(batch)
            replace_flat(groups, self.replies.read(self.global_steps, "train", len(items))[0])
        return groups

    @cached_property
    def _ids(self) -> list[str]:
        """The ids of the rows."""
        return [record["extra_info"]["id"] for record in self.train_dataset.records]

    @cached_property
    def _ranks(self) -> int:
        """The number of ranks that share a minibatch."""
        return int(max(self.actor_rollout_wg._query_dispatch_info("actor"))) + 1

    def _pick_rows(self) -> list[int]:
        """The rows of the step, picked as in local mode: they depend only on the step, so resuming needs no state."""
        count, step = self.recipe.train.prompts_per_step, self.global_steps - 1
        return pick(len(self.train_dataset), count, step, self.recipe.seed)

    def _fetch_one_gen_batch(self) -> TensorDict:
        return self._rows(self._pick_rows())

    def _rows(self, items: Sequence[int], again: int = 0) -> TensorDict:
        rows = [self.train_dataset[item] for item in items]
        earlier = count_earlier([row["extra_info"]["id"] for row in rows])
        for group, (row, before) in enumerate(zip(rows, earlier, strict=True)):
            row["extra_info"] = describe_place(row["extra_info"], group, before, again)
        batch = collate_fn(rows)
        batch["uid"] = np.array([str(uuid4()) for _ in rows], dtype=object)
        return tu.get_tensordict(batch)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], **more: Any) -> KVBatchMeta:
        """Record the results of the replies, stop if too many are missing, and cut the recipe's minibatches."""
        groups = self.replies.groups["train"]
        late = staleness(groups, self.global_steps - 1) if self.recipe.train.async_steps else {}
        metrics.update(mark_own(measure(groups, self.worker.context, self.recipe.train.trains_every_fork) | late))
        stop_if_missing(groups, self.recipe.reward.max_missing)
        if self.recipe.reward.blamed == "worst":
            metrics.update(mark_own(blame(groups, self.worker.context.futures)))
        batch = self.replies.without_untrained(batch)
        rows = -(-len(batch.keys) // min(self.recipe.train.minibatches, len(batch.keys)))
        # verl pads a minibatch so that every rank has the same number of rows.
        self.config.actor_rollout_ref.actor.ppo_mini_batch_size = -(-rows // self._ranks) * self._ranks
        self.config.critic.ppo_mini_batch_size = self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        return super()._balance_batch(batch, metrics=metrics, **more)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Log-probabilities of the reference, which is the policy without its adapters.

        verl leaves its mark for that in the batch, and a critic, which has no adapters, would fail because of it.
        """
        batch = super()._compute_ref_log_prob(batch, metrics)
        batch.extra_info.pop("no_lora_adapter", None)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Give every row the values that local mode would learn from; verl's own estimators are not used."""
        rows = self._read_measures(batch)
        inputs, logs = teach(self.recipe.train, self.replies.groups["train"], list(rows.values()))
        metrics.update(mark_own(logs))
        by_place = dict(zip(rows, inputs, strict=True))
        fields = columns([by_place.get(at) for at in range(len(batch.keys))], self.recipe.train.importance.rule)
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _read_measures(self, batch: KVBatchMeta) -> dict[int, BatchRow]:
        """The rows by their places, with the numbers that verl computed for them, without verl's padding rows."""
        used = (True, self.use_reference_policy, self.use_critic, self.recipe.train.entropy > 0)
        wanted = list(compress(COMPUTED, used))
        fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=wanted)
        measures = [[one.tolist() for one in fields[name].unbind()] if name in wanted else [] for name in COMPUTED]
        out: dict[int, BatchRow] = {}
        for at, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
            if not tag.get("is_padding"):
                row = [column[at] if column else () for column in measures]
                out[at] = BatchRow(self.replies.source(key), int(tag["seq_len"]), *row)
        return out

    # Without a single token to train, verl's means would be 0/0.

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return super()._update_actor(batch, metrics) if self.replies.places else batch

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return super()._update_critic(batch, metrics) if self.replies.places else batch

    def _validate(self) -> dict[str, float]:
        began = time.perf_counter()
        metrics: dict[str, float] = super()._validate()
        seen = summarise_held_out(self.replies.groups["val"], self.worker.context, self.worker.rows.task)
        logs = {f"eval/{key}": value for key, value in seen.items()}
        self._looked = {**logs, "time/eval": time.perf_counter() - began}
        if not self._begun:  # before the first step
            self._compute_metrics()
        return metrics | mark_own(logs)


@register_trainer(AGENT)
@report_phases
class UpshotTrainer(LocalLearning, PPOTrainerSync):  # type: ignore[misc]
    """Plays a step, and then learns from it."""


@register_trainer(AHEAD)
@report_phases
class AheadTrainer(LocalLearning, PPOTrainerColocateAsync):  # type: ignore[misc]
    """Has the next steps played while one is learned (`train.async_steps`); each learns from its own prompts alone.

    Conversations in progress at an update continue with the new weights, as is usual in verl.
    """

    global_steps: int
    _asked = 0
    """The last step whose prompts have been sent out."""

    def prepare_step(self) -> dict[str, Any]:
        """Send out the prompts of this step and of the next ones, each as if it were the current step."""
        step = self.global_steps
        last = min(step + self.recipe.train.async_steps, self.total_training_steps)
        for number in range(max(self._asked + 1, step), last + 1):
            self.global_steps = number
            self._add_batch_to_generate()
        self.global_steps, self._asked = step, last
        return {}


COMPUTED = ("old_log_probs", "ref_log_prob", "values", "entropy")
"""The numbers that verl computes for a row, in the order of `BatchRow`'s fields."""


def columns(inputs: Sequence[LearnerInputs | None], rule: str) -> TensorDict:
    """The learner's inputs under verl's names; None: a row that verl added as padding, with one untrained token."""

    def nested(name: str, kind: torch.dtype) -> torch.Tensor:
        rows = [[0] if one is None else getattr(one, name) or [0.0] * len(one.mask) for one in inputs]
        return torch.nested.as_nested_tensor([torch.tensor(row, dtype=kind) for row in rows], layout=torch.jagged)

    mask = nested("mask", torch.int64)
    fields = {"response_mask": mask, "loss_mask": mask.clone(), "advantages": nested("scaled", torch.float32)}
    fields |= {"old_log_probs": nested("old", torch.float32), "returns": nested("returns", torch.float32)}
    if rule != "none":
        fields["rollout_is_weights"] = nested("weights", torch.float32)
    return TensorDict(fields, batch_size=len(inputs))
