"""A task behind HTTP: the server opens the conversation, answers the turns and gives the reward. Two protocols.

instance: POST /start_instance {instance_hash} → {sid}; /process_action {sid, content}; /postprocess {sid};
/compute_reward {sid} → {reward}, or {f2p_count, f2p_total}.
chat: POST /start_sample {index, name} → {messages, tools}; /interact {the new messages} with a `session_id` header →
{messages, finish, reward, metrics}; /cancel. The session id comes from the start's answer (body or header).

A call that fails ends the episode as missing with the reason; a session that was started is always ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from upshot.config.bounds import Address, Count, Made, Positive
from upshot.core.conversation import Conversation, Message, Row, derive_seed, messages_from
from upshot.core.errors import UserError
from upshot.core.http_client import AttemptError, HttpClient, RetryPolicy
from upshot.core.score import Reason, Score
from upshot.tasks.base import last_reply, tasks
from upshot.tasks.datasets.files import Record
from upshot.tasks.datasets.records import row_of
from upshot.tasks.participants.base import Observation, Participant
from upshot.tasks.verified import VerifiedTask

KEY = "remote"
"""The key of a session's remote state."""


class RemoteError(Exception):
    """A call to the environment that failed, and the reason under which that is counted."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.reason = reason


class RemoteEnvironment(Participant):
    """One remote environment for all conversations; the state of each is in its session."""

    def __init__(
        self,
        url: str,
        protocol: Literal["instance", "chat"] = "chat",
        seconds: float = 120.0,
        connections: int = 64,
        retries: int = 2,
    ) -> None:
        self.protocol = protocol
        retry = RetryPolicy(retries, backoff_s=0.4)
        self.client = HttpClient(url, timeout_s=seconds, connections=connections, retry=retry)

    async def _post(
        self, path: str, body: Mapping[str, Any], session_id: str = "", retry: bool = False
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        """The answer's JSON object and headers; starts are retried, actions not, because they cannot be repeated."""
        headers = {"session_id": session_id} if session_id else {}
        try:
            return await self.client.request("POST", path, body, headers=headers, repeat="any" if retry else "never")
        except AttemptError as error:
            # If the connection breaks during an action, the action may have crashed the server; an unsent one cannot.
            lost = error.reason == "connection" and error.begun and not retry
            raise RemoteError(path, "crashed" if lost else error.reason) from error

    async def start(self, conversation: Conversation) -> None:
        """Open the remote session, and say its opening messages."""
        meta = conversation.row.meta
        if self.protocol == "instance":
            answer, _ = await self._post("/start_instance", {"instance_hash": meta["instance_hash"]}, retry=True)
            if "sid" not in answer:
                raise RemoteError("/start_instance", "bad_response")
            state: dict[str, Any] = {"id": str(answer["sid"])}
        else:
            body = {"index": meta["index"], "name": meta.get("name", "")}
            answer, headers = await self._post("/start_sample", body, retry=True)
            state = {"id": str(answer.get("session_id") or headers.get("session_id") or session_name(conversation))}
            if answer.get("tools"):
                conversation.session["tools"] = list(answer["tools"])
        opening = answer.get("messages") or answer.get("prompt") or []
        for message in [Message("user", opening)] if isinstance(opening, str) else messages_from(opening):
            conversation.say(message)
        conversation.session[KEY] = {**state, "known": len(conversation.turns)}

    async def observe(self, conversation: Conversation) -> Observation:
        """The server's answer to the last turn."""
        state = conversation.session[KEY]
        if self.protocol == "instance":
            body = {"sid": state["id"], "content": last_reply(conversation)}
            answer, _ = await self._post("/process_action", body)
            text = next((str(answer[key]) for key in ("content", "observation", "output") if answer.get(key)), "")
            messages: tuple[Message, ...] = (Message("user", text),) if text else ()
        else:
            # The server keeps the conversation: only what was said since its last message is sent.
            body = {"messages": [message.to_dict() for message in conversation.messages[state["known"] :]]}
            answer, _ = await self._post("/interact", body, state["id"])
            messages = messages_from(answer.get("messages") or [])
        done = bool(answer.get("finish") or answer.get("done") or answer.get("finished"))
        known = len(conversation.turns) + len(messages)
        conversation.session[KEY] = {**state, "known": known, "reward": answer.get("reward"), "done": done}
        numbers = {k: float(v) for k, v in (answer.get("metrics") or {}).items() if isinstance(v, int | float)}
        return Observation(messages, done or not messages, "finished" if done else "answered", metrics=numbers)

    async def end(self, conversation: Conversation) -> None:
        """Close the remote session; its reward becomes the conversation's own score."""
        state = conversation.session.get(KEY)
        if state is None:  # it never started: nothing to close
            return
        try:
            if self.protocol == "instance":
                await self._post("/postprocess", {"sid": state["id"]})
                answer, _ = await self._post("/compute_reward", {"sid": state["id"]}, retry=True)
                conversation.score = reward_of(answer)
                return
            conversation.score = reward_of(state)
            if not state.get("done"):
                await self._post("/cancel", {}, state["id"])
        except RemoteError as error:
            conversation.score = conversation.score or Score.failed(error, "remote")

    async def aclose(self) -> None:
        """Close the connections."""
        await self.client.aclose()


def session_name(conversation: Conversation) -> str:
    """Our own id for a session that the server does not name; it is unique in a run."""
    return f"{derive_seed(conversation.seed, conversation.key):016x}"


def reward_of(answer: Mapping[str, Any]) -> Score:
    """The score in an answer: `reward`, or the share of tests that went from fail to pass."""
    reward = answer.get("reward")
    if isinstance(reward, int | float):
        return Score(float(reward))
    total = answer.get("f2p_total")
    if isinstance(total, int | float) and total > 0:
        return Score(float(answer.get("f2p_count") or 0) / float(total), detail=dict(answer))
    return Score.missing(Reason.NOT_SCORED, "remote: no reward")


@tasks.register("remote")
class RemoteTask(VerifiedTask):
    """Rows name an instance (`instance_hash`) or a sample (`index`, `name`); the server decides everything else."""

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
