"""Environments behind HTTP, in two protocols.

instance: POST /start_instance {instance_hash} → {sid}; /process_action {sid, content}; /postprocess {sid};
/compute_reward {sid} → {reward}, or {f2p_count, f2p_total}.
chat: POST /start_sample {index, name} → {messages, tools}; /interact {messages} with a `session_id` header →
{messages, finish, reward, metrics}; /cancel. The session id comes from the start's answer (body or header).

A call that fails ends the episode as missing with the reason; a session that was started is always ended.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any, Literal

from upshot.core.conversation import Conversation, Message, derive_seed, messages_from
from upshot.core.score import Reason, Score
from upshot.core.time_limit import uncounted
from upshot.tasks.participants.base import Observation, Participant

KEY = "remote"
"""Where the session keeps its remote state."""


class RemoteError(Exception):
    """A call to the environment that failed, and the reason it is counted under."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.reason = reason


class _Client:
    """POST with a bounded number of connections; starts are retried, actions are not (they are not repeatable)."""

    def __init__(self, url: str, seconds: float, connections: int, retries: int) -> None:
        self.url = url.rstrip("/")
        self.seconds = seconds
        self.connections = connections
        self.retries = retries
        self._session: Any = None

    @uncounted
    async def post(
        self, path: str, body: Mapping[str, Any], session_id: str = "", retry: bool = False
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        """The answer's JSON object and headers."""
        for attempt in range(self.retries + 1 if retry else 1):
            if attempt:
                await asyncio.sleep(0.2 * 2**attempt * random.uniform(0.5, 1.5))
            try:
                return await self._once(path, body, session_id)
            except RemoteError as error:
                last = error
        raise last

    async def _once(
        self, path: str, body: Mapping[str, Any], session_id: str
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self.connections)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=self.seconds)
            )
        headers = {"session_id": session_id} if session_id else {}
        try:
            async with self._session.post(f"{self.url}{path}", json=dict(body), headers=headers) as answer:
                if answer.status != 200:
                    raise RemoteError(path, f"http_{answer.status}")
                data = await answer.json(content_type=None)
                if not isinstance(data, dict):
                    raise RemoteError(path, "bad_response")
                return data, answer.headers
        except TimeoutError as error:
            raise RemoteError(path, "timeout") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise RemoteError(path, "connection") from error

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class RemoteEnvironment(Participant):
    """One remote environment for all conversations; what belongs to one lives in its session."""

    def __init__(
        self,
        url: str,
        protocol: Literal["instance", "chat"] = "chat",
        seconds: float = 120.0,
        connections: int = 64,
        retries: int = 2,
    ) -> None:
        self.protocol = protocol
        self.client = _Client(url, seconds, connections, retries)

    async def start(self, conversation: Conversation) -> None:
        """Open the remote session; what it opens with is said."""
        meta = conversation.row.meta
        if self.protocol == "instance":
            answer, _ = await self.client.post("/start_instance", {"instance_hash": meta["instance_hash"]}, retry=True)
            if "sid" not in answer:
                raise RemoteError("/start_instance", "bad_response")
            state: dict[str, Any] = {"id": str(answer["sid"])}
        else:
            body = {"index": meta["index"], "name": meta.get("name", "")}
            answer, headers = await self.client.post("/start_sample", body, retry=True)
            state = {"id": str(answer.get("session_id") or headers.get("session_id") or session_name(conversation))}
            if answer.get("tools"):
                conversation.session["tools"] = list(answer["tools"])
        conversation.session[KEY] = state
        opening = answer.get("messages") or answer.get("prompt") or []
        for message in [Message("user", opening)] if isinstance(opening, str) else messages_from(opening):
            conversation.say(message)

    async def observe(self, conversation: Conversation) -> Observation:
        """What comes back for the last turn."""
        state = conversation.session[KEY]
        if self.protocol == "instance":
            last = conversation.last("assistant")
            body = {"sid": state["id"], "content": last.content if last else ""}
            answer, _ = await self.client.post("/process_action", body)
            text = next((str(answer[key]) for key in ("content", "observation", "output") if answer.get(key)), "")
            messages: tuple[Message, ...] = (Message("user", text),) if text else ()
        else:
            body = {"messages": [message.to_dict() for message in conversation.messages]}
            answer, _ = await self.client.post("/interact", body, state["id"])
            messages = messages_from(answer.get("messages") or [])
        done = bool(answer.get("finish") or answer.get("done") or answer.get("finished"))
        conversation.session[KEY] = {**state, "reward": answer.get("reward"), "done": done}
        numbers = {k: float(v) for k, v in (answer.get("metrics") or {}).items() if isinstance(v, int | float)}
        return Observation(messages, done or not messages, "finished" if done else "answered", metrics=numbers)

    async def end(self, conversation: Conversation) -> None:
        """Close the remote session; its reward becomes the conversation's own score."""
        state = conversation.session.get(KEY)
        if state is None:  # it never started: nothing to close
            return
        try:
            if self.protocol == "instance":
                await self.client.post("/postprocess", {"sid": state["id"]})
                answer, _ = await self.client.post("/compute_reward", {"sid": state["id"]}, retry=True)
                conversation.session["score"] = reward_of(answer)
                return
            conversation.session["score"] = reward_of(state)
            if not state.get("done"):
                await self.client.post("/cancel", {}, state["id"])
        except RemoteError as error:
            if not isinstance(conversation.session.get("score"), Score):
                conversation.session["score"] = Score.failed(error, "remote")

    async def aclose(self) -> None:
        """Close the connections."""
        await self.client.close()


def session_name(conversation: Conversation) -> str:
    """An id of our own for a session that the server does not name: no other conversation of a run has it."""
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
