"""verl's buffer of rows, read together with the replies that the rows are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from upshot.cluster.adapters.loop import FAULT, REPLY
from upshot.errors import UserError
from upshot.rollout.reply import Reply
from upshot.train.handover import unpacked


class Replies:
    """What was played last, by verl's partition ('train', 'val'), and which row is of which reply."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.groups: dict[str, list[list[Reply]]] = {}
        """By the rows' places in the step, replies in the order of their sessions: as local mode has them."""
        self.of_key: dict[str, Reply] = {}

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """verl's rows of a step, when all are played. Those that train nothing are taken away after they were read."""
        batch, logs = self.buffer.sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        self.read(batch)
        return self._kept(batch), logs

    def read(self, batch: KVBatchMeta) -> None:
        """Read the replies of rows."""
        found = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        extras = dict(zip(batch.keys, found["extra_fields"].tolist(), strict=True))
        for extra in extras.values():
            if FAULT in extra:
                raise UserError(extra[FAULT])
        first = {_session(key): unpacked(extra[REPLY]) for key, extra in extras.items() if extra[REPLY]}
        self.of_key = {key: first[_session(key)] for key in batch.keys}
        groups: dict[int, list[tuple[int, Reply]]] = {}
        for (_, session), reply in first.items():
            groups.setdefault(reply.group, []).append((session, reply))
        self.groups[batch.partition_id] = [[r for _, r in sorted(groups[at], key=_by_session)] for at in sorted(groups)]

    def _kept(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The rows that train something, or that validation has a reward of; one at least, for verl wants a batch."""
        scored = batch.partition_id == "val"
        keep = [
            not reply.reward.total.is_missing if scored else reply.credit is not None and reply.credit.trains
            for reply in (self.of_key[key] for key in batch.keys)
        ]
        if not any(keep):
            keep[0] = True
        gone = [key for key, stays in zip(batch.keys, keep, strict=True) if not stays]
        if gone:
            tq.kv_clear(keys=gone, partition_id=batch.partition_id)
        kept: Sequence[tuple[str, Any]] = [
            pair for pair, stays in zip(zip(batch.keys, batch.tags, strict=True), keep, strict=True) if stays
        ]
        return KVBatchMeta(
            partition_id=batch.partition_id, keys=[key for key, _ in kept], tags=[tag for _, tag in kept]
        )


def _session(key: str) -> tuple[str, int]:
    """The prompt's uid and the number of the reply that a row is of."""
    uid, session, _ = key.rsplit("_", 2)
    return uid, int(session)


def _by_session(pair: tuple[int, Reply]) -> int:
    return pair[0]
