"""verl's buffer of rows, read together with the replies to which the rows belong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from upshot.core.errors import UserError
from upshot.rollout.reply import Branch, Rollout
from upshot.training.learner.distributed.pickling import loads
from upshot.verl.adapters.loop import COUNTED, FAULT, REPLY
from upshot.verl.recorder import Counted
from upshot.verl.trajectory import RowPlace, places_of

Groups = list[list[Rollout]]


class OwnStepBuffer(ReplayBuffer):  # type: ignore[misc]
    """verl's buffer; a step takes only its own prompts from it, however many others have ended."""

    _step = 0

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """The rows of a step, once all are played."""
        self._step = global_steps
        return super().sample(global_steps, partition_id, batch_size)

    def _sampleable_terminal_keys(self, partition_id: str, eviction_reasons: Any) -> set[str]:
        steps = self.prompt_global_steps[partition_id]
        ended = super()._sampleable_terminal_keys(partition_id, eviction_reasons)
        return {uid for uid in ended if steps[uid] == self._step}


class PlayedRollouts:
    """The replies played last, by verl's partition ('train', 'val'), and which row belongs to which reply."""

    def __init__(self, buffer: Any, play_on: Callable[[Groups], Groups], alone: bool = False) -> None:
        """`alone`: see `places_of`."""
        self.buffer = buffer
        self.alone = alone
        self.play_on = play_on
        """Called with the groups of a training step; returns those to learn from, and may play more (`read`)."""
        self.groups: dict[str, Groups] = {}
        """The groups by the rows' places in the step, with replies in the order of their sessions, as in local mode."""
        self.of_key: dict[str, Rollout] = {}
        self.places: dict[str, RowPlace] = {}
        """The places of the rows that train something, by key."""
        self.counted: Counted = {}
        self._tags: dict[str, Any] = {}

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """verl's rows of a step, once all are played: those that train something or, in validation, have a reward."""
        self.of_key, self.places, self._tags = {}, {}, {}
        groups, logs = self.read(global_steps, partition_id, batch_size)
        if partition_id == "train":
            groups = self.play_on(groups)
            counted = set(self.places)
        else:
            counted = {key for key, reply in self.of_key.items() if not reply.reward.total.is_missing}
        self.groups[partition_id] = groups
        played = {id(reply) for group in groups for reply in group}
        kept = [key for key, reply in self.of_key.items() if key in counted and id(reply) in played]
        self.places = {key: self.places[key] for key in kept if key in self.places}
        return self._keep(list(self.of_key), kept, partition_id), logs

    def source(self, key: str) -> Rollout | Branch:
        """The reply, or the branch, that a row holds."""
        return self.places[key].source if key in self.places else self.of_key[key]

    def read(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Groups, dict[str, Any]]:
        """Wait until this many prompts are played; returns their replies."""
        batch, logs = self.buffer.sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        self._tags |= dict(zip(batch.keys, batch.tags, strict=True))
        fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        extra_fields = [getattr(one, "data", one) for one in fields["extra_fields"]]  # plain, or wrapped by tensordict
        extras = dict(zip(batch.keys, extra_fields, strict=True))
        for extra in extras.values():
            if FAULT in extra:
                raise UserError(extra[FAULT])
        for name, number, counters in (extra[COUNTED] for extra in extras.values()):
            if number >= self.counted.get(name, (0, {}))[0]:
                self.counted = {**self.counted, name: (number, counters)}
        first = {_session(key): loads(extra[REPLY]) for key, extra in extras.items() if extra[REPLY]}
        self.of_key |= {key: first[_session(key)] for key in batch.keys}
        for (uid, session), reply in first.items():
            places = places_of(reply, self.alone, maybe=True) if partition_id == "train" else []
            self.places |= {f"{uid}_{session}_{number}": place for number, place in enumerate(places)}
        groups: dict[int, dict[int, Rollout]] = {}
        for (_, session), reply in first.items():
            groups.setdefault(reply.group, {})[session] = reply
        return [[groups[at][session] for session in sorted(groups[at])] for at in sorted(groups)], logs

    def without_untrained(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The rows of a batch, now that the groups are compared, without those that train nothing."""
        replies = [reply for group in self.groups["train"] for reply in group]
        trained = {(id(place.source), place.stop) for reply in replies for place in places_of(reply, self.alone)}
        gone = {key for key, place in self.places.items() if (id(place.source), place.stop) not in trained}
        if not gone:
            return batch
        self.places = {key: place for key, place in self.places.items() if key not in gone}
        return self._keep(batch.keys, [key for key in batch.keys if key not in gone], batch.partition_id)

    def _keep(self, keys: list[str], kept: list[str], partition_id: str) -> KVBatchMeta:
        """The batch of the rows `kept`, at least one because verl needs a batch; the other `keys` are removed."""
        kept = kept or keys[:1]
        if gone := sorted(set(keys) - set(kept)):
            tq.kv_clear(keys=gone, partition_id=partition_id)
        return KVBatchMeta(partition_id=partition_id, keys=kept, tags=[self._tags[key] for key in kept])


def _session(key: str) -> tuple[str, int]:
    """The prompt's uid and the number of the reply to which a row belongs."""
    uid, session, _ = key.rsplit("_", 2)
    return uid, int(session)
