"""Our trainer on verl's rows, with a queue in this process and no Ray. Run by `make test-cluster`."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

import torch
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from tests.cluster.test_same_as_local import DOWN, lesson_of, number, on_verl, recipe_of, some, words
from upshot.cluster.adapters import replies as replies_module
from upshot.cluster.adapters import trainer as trainer_module
from upshot.cluster.adapters.loop import FAULT, REPLY, _output
from upshot.cluster.adapters.replies import Replies
from upshot.cluster.adapters.trainer import UpshotTrainer
from upshot.cluster.trajectory import trajectories_of
from upshot.errors import UserError
from upshot.recipe import Recipe
from upshot.rollout.reply import Reply
from upshot.train.handover import packed, unpacked


class Queue:
    """What the trainer needs of the transfer queue."""

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
    """verl's buffer when all is played: rows in any order."""

    def __init__(self, queue: Queue, groups: Sequence[Sequence[Reply]], faults: Sequence[str] = ()) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        for group, own in enumerate(groups):
            for session, reply in enumerate(own):
                for index, row in enumerate(trajectories_of(reply, 1)):
                    extra = {REPLY: b"" if index else packed(reply), **({FAULT: faults[0]} if faults else {})}
                    key = f"uid{group}_{session}_{index}"
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
    """Our trainer, as far as it is needed here."""
    made = object.__new__(UpshotTrainer)
    made.recipe, made.use_reference_policy = recipe, bool(recipe.train.kl)
    made.use_critic = recipe.train.method == "ppo"
    made.replies = Replies(buffer, lambda groups: groups)
    return made


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    for module in (replies_module, trainer_module):
        monkeypatch.setattr(module, "tq", made)
    return made


@pytest.mark.parametrize(
    "more",
    [
        ["train.advantage=gdpo"],
        ["train.importance=mask", "train.importance.high=1.05"],
        ["train.kl=0.1", "train.kl_in=reward"],
        ["train.method=ppo", "train.kl=0.05"],
    ],
    ids=" ".join,
)
def test_rows_are_told_what_local_mode_learns(queue: Queue, more: list[str]) -> None:
    recipe = recipe_of(*more)
    groups = on_verl(recipe, some(recipe, 3, 9, 5), 0)
    trainer = trainer_of(recipe, Buffer(queue, groups))
    batch, _ = trainer.replies.sample(1, "train", 3)
    assert len(batch.keys) == len(queue.rows) < 12  # the missing ones were read and taken away
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
    lesson = lesson_of(recipe, unpacked(packed(groups)))
    assert metrics["upshot/train/sequences"] == len(lesson) == len(batch.keys) - 1
    found = {(r.conversation.key, len(datum.ids)): datum for r, datum in lesson}
    for key, tag in zip(batch.keys[:-1], batch.tags[:-1], strict=True):
        datum, row = found[trainer.replies.of_key[key].conversation.key, tag["seq_len"]], queue.rows[key]
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
    assert len(batch.keys) == 1 and not trainer._teaches()
    trainer._compute_advantage(batch, {})
    assert queue.rows[batch.keys[0]]["response_mask"].tolist() == [0]


def test_what_a_user_must_mend_stops_the_run(queue: Queue) -> None:
    groups = on_verl(recipe_of(), some(recipe_of(), 3), 0, words)
    with pytest.raises(UserError, match="no key"):
        Replies(Buffer(queue, groups, ["no key"]), lambda groups: groups).sample(1, "train", 1)


def test_rows_of_a_step_are_those_that_local_mode_picks_each_with_its_place() -> None:
    from upshot.train.sft import pick

    recipe = recipe_of("train.prompts_per_step=40")
    trainer = trainer_of(recipe, None)  # type: ignore[arg-type]
    rows = [{"extra_info": {"id": str(item)}, "raw_prompt": [], "dummy": torch.zeros(1)} for item in range(64)]
    trainer.train_dataset, trainer.global_steps = rows, 2
    batch = trainer._fetch_one_gen_batch()
    infos = [getattr(one, "data", one) for one in batch["extra_info"]]
    assert [int(info["id"]) for info in infos] == pick(64, 40, 1, recipe.seed)
    assert [info["group"] for info in infos] == list(range(40))
    assert sum(info["earlier"] for info in infos) == 40 - len({info["id"] for info in infos}) > 0
    assert SimpleNamespace(**rows[0]).extra_info == {"id": "0"}
