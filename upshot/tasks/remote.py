"""A task that lives behind HTTP: the server opens the conversation, answers the turns and gives the reward."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from upshot.config.bounds import Address, Count, Made, Positive
from upshot.core.conversation import Row
from upshot.core.errors import UserError
from upshot.tasks.base import tasks
from upshot.tasks.datasets.files import Record
from upshot.tasks.datasets.records import row_of
from upshot.tasks.participants.base import Participant
from upshot.tasks.participants.remote import RemoteEnvironment
from upshot.tasks.verified import VerifiedTask


@tasks.register("remote")
class RemoteTask(VerifiedTask):
    """Rows name an instance (`instance_hash`) or a sample (`index`, `name`); everything else is the server's."""

    name = "remote"

    def __init__(
        self,
        url: Address,
        protocol: Literal["instance", "chat"] = "chat",
        samples: Made | Literal[0] = 0,
        sample_name: str = "",
        seconds: Positive = 120.0,
        connections: Count = 64,
        **table: Any,
    ) -> None:
        """Make the task.

        protocol: instance (/start_instance …) or chat (/start_sample …).
        samples: without a file, rows are the indices 0 … samples-1 of `sample_name` (protocol chat).
        """
        super().__init__(**table)
        if samples and protocol == "instance":
            raise UserError("task 'remote' with protocol 'instance' needs a file with 'instance_hash', not 'samples'")
        self._samples = [{"index": index, "name": sample_name} for index in range(samples)]
        self._environment = RemoteEnvironment(url, protocol, seconds, connections)
        self._key = "instance_hash" if protocol == "instance" else "index"

    def environment(self) -> Participant:
        """The server."""
        return self._environment

    @cached_property
    def _tables(self) -> dict[str, list[Record]]:
        return {"train": list(self._samples)} if self._samples else super()._tables

    def parse(self, record: Mapping[str, Any]) -> Row:
        """A record as a row; its opening may be empty, since the server opens."""
        if self._key not in record:
            raise UserError(f"task 'remote': a row has no '{self._key}'; its keys: {', '.join(record)}")
        if any(record.get(key) for key in ("prompt", "messages", "question", "problem")):
            return row_of(record, "remote", "", self.system)
        identity = f"{record.get('name', '')}#{record[self._key]}"
        return Row(identity, (), None, None, "remote", dict(record))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._environment.aclose()
