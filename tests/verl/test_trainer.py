"""Our trainer on verl's rows, with a queue in this process and without Ray. Run by `make test-cluster`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from tests.verl.test_same_as_local import (
    DOWN,
    Local,
    Servers,
    local_data,
    number,
    on_verl,
    recipe_of,
    some,
    words,
)
from tests.verl.test_worker import RENDERER, TOKENIZER
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.rollout.episode import Policy
from upshot.rollout.reply import Branch, Rollout
from upshot.rollout.services import build_context, build_services
from upshot.tasks.base import tasks
from upshot.training.learner.distributed.pickling import dumps, loads
from upshot.training.loops import rl
from upshot.training.setup import sampling_of
from upshot.verl.adapters import replies as replies_module
from upshot.verl.adapters import trainer as trainer_module
from upshot.verl.adapters.loop import COUNTED, FAULT, REPLY, _output
from upshot.verl.adapters.replies import OwnStepBuffer, PlayedRollouts
from upshot.verl.adapters.trainer import AheadTrainer, UpshotTrainer
from upshot.verl.plan import RECIPE
from upshot.verl.rows import record_of
from upshot.verl.served import ConversationLink
from upshot.verl.train_batch import _scale
from upshot.verl.trajectory import trajectories_of
from upshot.verl.worker import PlayRequest, RolloutWorker


class Queue:
    """What the trainer needs from the transfer queue."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> Any:
        return list_of_dict_to_tensordict([{name: self.rows[key][name] for name in select_fields} for key in keys])

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: Any) -> KVBatchMeta:
        for name, column in fields.items():
            for key, value in zip(keys, column.unbind(), strict=True):
                self.rows[key][name] = value
        return KVBatchMeta(partition_id=partition_id, keys=list(keys), tags=[{} for _ in keys])

    def kv_clear(self, keys: Sequence[str], partition_id: str) -> None:
        for key in keys:
            del self.rows[key]


class Buffer:
    """verl's buffer when everything is played: rows in any order."""

    def __init__(
        self, queue: Queue, groups: Sequence[Sequence[Rollout]], faults: Sequence[str] = (), prefix: str = "uid"
    ) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        for group, own in enumerate(groups):
            for session, reply in enumerate(own):
                for index, row in enumerate(trajectories_of(reply, 1, maybe=True)):
                    extra = {REPLY: b"" if index else dumps(reply), **({FAULT: faults[0]} if faults else {})}
                    extra[COUNTED] = ("a worker", group + session, {})
                    key = f"{prefix}{group}_{session}_{index}"
                    queue.rows[key] = _output(row, 0.0, extra, 0.0).as_dict()
                    ids = [*row.prompt_ids, *row.response_ids]
                    found = [number(ids, at) for at in range(len(row.prompt_ids), len(ids))]
                    for name, more in (("old_log_probs", 0.0), ("ref_log_prob", -0.11), ("values", 0.9)):
                        queue.rows[key][name] = torch.tensor([value + more for value in found], dtype=torch.float64)
                    self.tags[key] = {"seq_len": len(ids)}

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        keys = sorted(self.tags, reverse=True)
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=[self.tags[key] for key in keys]), {}


def trainer_of(recipe: Recipe, buffer: Buffer) -> UpshotTrainer:
    """Our trainer, as far as it is used here."""
    made = object.__new__(UpshotTrainer)
    made.recipe, made.use_reference_policy = recipe, bool(recipe.train.kl.weight)
    made.use_critic = recipe.train.method == "ppo"
    made.replies, made.global_steps = PlayedRollouts(buffer, lambda groups: groups), 1
    return made


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Queue:
    made = Queue()
    monkeypatch.setenv(RECIPE, str(tmp_path / "recipe.yaml"))
    for module in (replies_module, trainer_module):
        monkeypatch.setattr(module, "tq", made)
    return made


@pytest.mark.parametrize(
    "more",
    [
        ["train.advantage=gdpo"],
        ["train.importance=mask", "train.importance.high=1.05"],
        ["train.kl=0.1", "train.kl.where=reward"],
        ["train.method=ppo", "train.kl=0.05"],
        ["credit.by=tree", "train.importance=truncate"],
    ],
    ids=" ".join,
)
def test_rows_receive_what_local_mode_learns(queue: Queue, more: list[str]) -> None:
    recipe = recipe_of(*more)
    groups = on_verl(recipe, some(recipe, 3, 9, 5), 0)
    trainer = trainer_of(recipe, Buffer(queue, groups))
    batch, _ = trainer.replies.sample(1, "train", 3)
    assert len(batch.keys) == len(queue.rows) < 24  # the missing ones were read and removed
    sources = [place.source for place in trainer.replies.places.values()]
    assert len(sources) == len(batch.keys)
    assert any(isinstance(source, Branch) for source in sources) == (recipe.credit.by == "tree")
    assert [[r.conversation.key for r in own] for own in trainer.replies.groups["train"]] == [
        [r.conversation.key for r in own] for own in groups
    ]
    queue.rows["pad_0_0"] = dict.fromkeys(
        ("old_log_probs", "ref_log_prob", "values"), torch.zeros(1, dtype=torch.float64)
    )
    batch = KVBatchMeta(
        partition_id="train", keys=[*batch.keys, "pad_0_0"], tags=[*batch.tags, {"is_padding": True, "seq_len": 128}]
    )
    metrics: dict[str, float] = {}
    trainer._compute_advantage(batch, metrics)
    data = local_data(recipe, loads(dumps(groups)))
    assert metrics["upshot/train/sequences"] == len(data) == len(batch.keys) - 1
    found = {(datum.source.conversation.key, len(datum.ids)): datum for datum in data if datum.source}
    scale = _scale(recipe.train, list(found.values()))
    for key, tag in zip(batch.keys[:-1], batch.tags[:-1], strict=True):
        datum, row = found[trainer.replies.source(key).conversation.key, tag["seq_len"]], queue.rows[key]
        datum.advantages = [datum.share * scale * advantage for advantage in datum.advantages]
        first = len(row["prompts"])
        names = {"advantages": "advantages", "old_log_probs": "old", "response_mask": "mask", "loss_mask": "mask"}
        names |= {"returns": "returns"} if recipe.train.method == "ppo" else {}
        names |= {"rollout_is_weights": "weights"} if recipe.train.importance.rule != "none" else {}
        for theirs, ours in names.items():
            assert row[theirs].tolist() == pytest.approx(list(getattr(datum, ours))[first:], abs=1e-6), theirs
    assert queue.rows["pad_0_0"]["response_mask"].tolist() == [0]


def test_a_step_in_which_nothing_can_be_learned_keeps_a_row_that_trains_nothing(queue: Queue) -> None:
    recipe = recipe_of()
    groups = on_verl(recipe, some(recipe, 3), 0, lambda prompt, seed: DOWN)
    trainer = trainer_of(recipe, Buffer(queue, groups))
    batch, _ = trainer.replies.sample(1, "train", 1)
    assert len(batch.keys) == 1 and not trainer.replies.places
    trainer._compute_advantage(batch, {})
    assert queue.rows[batch.keys[0]]["response_mask"].tolist() == [0]


class Playing(Buffer):
    """verl's buffer during a step: what was submitted is finished at the next look."""

    def __init__(self, queue: Queue, recipe: Recipe) -> None:
        self.queue, self.tags, self.rounds = queue, {}, 0
        self.worker, self.servers = RolloutWorker(recipe, TOKENIZER, 256), Servers(words)

    def submit(self, batch: Any) -> None:
        """Play the rows of a batch."""
        infos = [getattr(one, "data", one) for one in batch["extra_info"]]

        async def all_of_them() -> list[list[Rollout]]:
            line, size = ConversationLink(self.servers, "x", seeded=True), self.worker.recipe.train.group_size
            return [
                [await self.worker.play(PlayRequest(info, session, 0), line) for session in range(size)]
                for info in infos
            ]

        new = Buffer(self.queue, asyncio.run(all_of_them()), prefix=f"round{self.rounds}")
        self.tags, self.rounds = new.tags, self.rounds + 1


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_flat_groups_are_played_again_with_the_rows_that_local_mode_takes(queue: Queue, rounds: int) -> None:
    recipe = recipe_of("train.group_size=2", "train.prompts_per_step=6", f"train.dynamic_sampling={rounds}")
    rows = some(recipe, *range(64))
    model = Local(words)
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    services = build_services(recipe, task, model, TOKENIZER, RENDERER)
    context = build_context(recipe, services, Policy(model, RENDERER, sampling_of(recipe), 256))
    local = asyncio.run(rl.play(recipe, context, rows, 0, lambda done, total: None))

    buffer = Playing(queue, recipe)
    trainer = trainer_of(recipe, buffer)
    trainer.replies = PlayedRollouts(buffer, trainer._play_on)
    trainer.train_dataset = Dataset([record_of(row, at, "train") for at, row in enumerate(rows)])
    trainer.global_steps, trainer._submit_batch_to_rollout = 1, buffer.submit
    buffer.submit(trainer._fetch_one_gen_batch())
    batch, _ = trainer.replies.sample(1, "train", 6)
    groups = trainer.replies.groups["train"]
    assert [[r.to_dict(0) for r in own] for own in groups] == [[r.to_dict(0) for r in own] for own in local]
    assert set(batch.keys) == set(queue.rows) and (buffer.rounds > 1) == bool(rounds)


class Dataset(list[Any]):
    """verl's rows."""

    @property
    def records(self) -> list[Any]:
        return list(self)

    def __getitem__(self, at: Any) -> Any:
        return dict(super().__getitem__(at))


@pytest.mark.parametrize(
    ("rows", "parts", "ranks", "size"), [(10, 1, 2, 10), (9, 1, 2, 10), (10, 3, 2, 4), (1, 4, 2, 2), (7, 2, 1, 4)]
)
def test_a_minibatch_has_its_share_of_the_existing_rows(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, rows: int, parts: int, ranks: int, size: int
) -> None:
    recipe = recipe_of(f"train.minibatches={parts}", "reward.max_missing=1")
    trainer = trainer_of(recipe, None)  # type: ignore[arg-type]
    actor, critic = SimpleNamespace(ppo_mini_batch_size=0), SimpleNamespace(ppo_mini_batch_size=0)
    trainer.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor), critic=critic)
    trainer.worker, trainer._ranks = RolloutWorker(recipe, TOKENIZER, 256), ranks
    trainer.replies.groups["train"] = on_verl(recipe, some(recipe, 3), 0)
    monkeypatch.setattr(PPOTrainerSync, "_balance_batch", lambda self, batch, metrics: batch)
    metrics: dict[str, float] = {}
    keys = [str(row) for row in range(rows)]
    trainer._balance_batch(KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys]), metrics)
    assert actor.ppo_mini_batch_size == critic.ppo_mini_batch_size == size
    assert "upshot/reward/missing" in metrics


def test_too_much_missing_stops_the_run_with_the_reasons(queue: Queue) -> None:
    recipe = recipe_of("reward.max_missing=0.2")
    trainer = trainer_of(recipe, None)  # type: ignore[arg-type]
    trainer.worker = RolloutWorker(recipe, TOKENIZER, 256)
    trainer.replies.groups["train"] = on_verl(recipe, some(recipe, 3), 0, lambda prompt, seed: DOWN)
    with pytest.raises(UserError, match=r"4 of 4 replies have no reward \(4 x closed.*reward.max_missing"):
        trainer._balance_batch(KVBatchMeta(partition_id="train", keys=["a"], tags=[{}]), {})


def test_a_user_error_stops_the_run(queue: Queue) -> None:
    groups = on_verl(recipe_of(), some(recipe_of(), 3), 0, words)
    with pytest.raises(UserError, match="no key"):
        PlayedRollouts(Buffer(queue, groups, ["no key"]), lambda groups: groups).sample(1, "train", 1)


def test_rows_of_a_step_are_those_that_local_mode_picks_each_with_its_place() -> None:
    from upshot.training.loops.phase import pick

    recipe = recipe_of("train.prompts_per_step=40")
    trainer = trainer_of(recipe, None)  # type: ignore[arg-type]
    rows = Dataset({"extra_info": {"id": str(item)}, "raw_prompt": [], "index": item} for item in range(64))
    trainer.train_dataset, trainer.global_steps = rows, 2
    batch = trainer._fetch_one_gen_batch()
    infos = [getattr(one, "data", one) for one in batch["extra_info"]]
    assert [int(info["id"]) for info in infos] == pick(64, 40, 1, recipe.seed)
    assert [info["group"] for info in infos] == list(range(40))
    assert sum(info["earlier"] for info in infos) == 40 - len({info["id"] for info in infos}) > 0
    assert SimpleNamespace(**rows[0]).extra_info == {"id": "0"}


def test_a_trainer_that_plays_ahead_sends_out_each_step_once_under_its_own_number() -> None:
    made, sent = object.__new__(AheadTrainer), []
    made.recipe, made.total_training_steps = recipe_of("train.async_steps=2"), 5
    made._add_batch_to_generate = lambda: sent.append(made.global_steps)
    for step in (2, 3, 4, 5):  # resumed after step 1
        made.global_steps = step
        made.prepare_step()
        assert made.global_steps == step and max(sent) == min(step + 2, 5)
    assert sent == [2, 3, 4, 5]


def test_a_step_takes_its_own_prompts_however_many_of_the_next_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"1a": 1, "1b": 1, "2a": 2, "2b": 2}
    ended = {uid: {"is_prompt": True, "status": "finished", "global_steps": at} for uid, at in steps.items()}
    rows = {f"{uid}_0_0": {"status": "success"} for uid in ended}
    late = iter(["running", "finished"])

    def listed() -> dict[str, Any]:
        return {"train": {**ended, **rows, "1b": {**ended["1b"], "status": next(late)}}}

    monkeypatch.setattr(replay_buffer, "tq", SimpleNamespace(kv_list=listed, kv_clear=lambda **_: None))
    buffer = OwnStepBuffer("sync", {}, None, "drop", {}, poll_interval=0.0)
    batch, _ = buffer.sample(1, "train", 2)
    assert sorted(batch.keys) == ["1a_0_0", "1b_0_0"]
