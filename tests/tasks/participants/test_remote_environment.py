"""Remote environments in both protocols: sessions are opened, answered, scored and always closed; failures are
missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from upshot.core.conversation import Conversation, Message, Row
from upshot.core.score import Score
from upshot.tasks.environments.remote import RemoteEnvironment, RemoteError, reward_of, session_name


class Server:
    """A number to guess, in both protocols; records what it received."""

    def __init__(self, break_at: str = "", **reward: Any) -> None:
        self.calls: list[tuple[str, str]] = []
        self.break_at = break_at
        self.reward = reward or {"reward": 0.5}
        self.starts = 0
        self.sent: dict[str, list[list[str]]] = {}
        """For each session, the roles of the messages in each `/interact`."""

    async def handle(self, request: web.Request) -> web.Response:
        data = await request.json()
        session = str(data.get("sid") or request.headers.get("session_id", ""))
        self.calls.append((request.path, session))
        if request.path == self.break_at:
            return web.Response(status=500)
        if request.path == "/start_instance":
            self.starts += 1
            return web.json_response(
                {"sid": f"s-{data['instance_hash']}", "messages": [{"role": "user", "content": "go"}]}
            )
        if request.path == "/process_action":
            return web.json_response({"content": f"saw {data['content']}", "done": data["content"] == "stop"})
        if request.path == "/compute_reward":
            return web.json_response(self.reward)
        if request.path == "/start_sample":
            self.starts += 1
            opening = [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"n{data['index']}"}]
            return web.json_response({"messages": opening, "tools": [], "session_id": f"c-{data['index']}"})
        if request.path == "/interact":
            self.sent.setdefault(session, []).append([message["role"] for message in data["messages"]])
            last = data["messages"][-1]["content"]
            finish = last == "stop"
            reply = [] if finish else [{"role": "user", "content": f"saw {last}"}]
            body = {
                "messages": reply,
                "finish": finish,
                "reward": 1.0 if finish else None,
                "metrics": {"hops": 1, "x": "y"},
            }
            return web.json_response(body)
        return web.json_response({})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/{tail:.*}", self.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def play(environment: RemoteEnvironment, meta: dict[str, Any], *replies: str) -> Conversation:
    conversation = Conversation(Row("r", (), meta=meta))
    await environment.start(conversation)
    try:
        for reply in replies:
            conversation.say(Message("assistant", reply))
            observation = await environment.observe(conversation)
            conversation.count(observation.metrics)
            for message in observation.messages:
                conversation.say(message)
            if observation.done:
                break
    finally:
        await environment.end(conversation)
    return conversation


def test_the_chat_protocol_from_start_to_reward() -> None:
    async def run() -> tuple[Server, list[Conversation]]:
        server = Server()
        async with server.running() as url:
            environment = RemoteEnvironment(url, "chat")
            played = [play(environment, {"index": n}, *["on"] * (n % 3), "stop") for n in range(20)]
            conversations = list(await asyncio.gather(*played))
            await environment.aclose()
        return server, conversations

    server, conversations = asyncio.run(run())
    for number, conversation in enumerate(conversations):
        assert conversation.turns[1].message.content == f"n{number}"
        assert conversation.score == Score(1.0)
        assert conversation.counts == {"hops": number % 3 + 1}
        assert server.sent[f"c-{number}"] == [["assistant"]] * (number % 3 + 1), "what is new, and nothing twice"
    assert not [path for path, _ in server.calls if path == "/cancel"]


def test_an_unfinished_chat_is_cancelled_and_its_reward_missing() -> None:
    async def run() -> tuple[Server, Conversation]:
        server = Server()
        async with server.running() as url:
            environment = RemoteEnvironment(url, "chat")
            conversation = await play(environment, {"index": 7}, "on")
            await environment.aclose()
        return server, conversation

    server, conversation = asyncio.run(run())
    assert ("/cancel", "c-7") in server.calls
    assert conversation.score.why == "remote: no reward"


def test_the_instance_protocol_from_start_to_reward() -> None:
    async def run() -> tuple[Server, Conversation]:
        server = Server(f2p_count=3, f2p_total=4)
        async with server.running() as url:
            environment = RemoteEnvironment(url, "instance")
            conversation = await play(environment, {"instance_hash": "abc"}, "ls", "stop")
            await environment.aclose()
        return server, conversation

    server, conversation = asyncio.run(run())
    assert [path for path, _ in server.calls] == [
        "/start_instance", "/process_action", "/process_action", "/postprocess", "/compute_reward",
    ]  # fmt: skip
    assert all(session == "s-abc" for path, session in server.calls[1:])
    assert conversation.score.value == 0.75
    assert conversation.messages[2] == Message("user", "saw ls")


def test_a_failing_start_is_tried_again_and_then_an_error_with_a_countable_reason() -> None:
    async def run() -> Server:
        server = Server(break_at="/start_sample")
        async with server.running() as url:
            environment = RemoteEnvironment(url, "chat", retries=1)
            with pytest.raises(RemoteError, match="/start_sample http_500"):
                await play(environment, {"index": 1}, "on")
            await environment.aclose()
        return server

    assert len(asyncio.run(run()).calls) == 2


def test_a_failing_action_still_closes_the_session() -> None:
    async def run() -> Server:
        server = Server(break_at="/process_action")
        async with server.running() as url:
            environment = RemoteEnvironment(url, "instance")
            with pytest.raises(RemoteError, match="/process_action http_500"):
                await play(environment, {"instance_hash": "abc"}, "ls")
            await environment.aclose()
        return server

    assert "/postprocess" in [path for path, _ in asyncio.run(run()).calls]


def test_a_failing_reward_is_missing() -> None:
    async def run() -> Conversation:
        server = Server(break_at="/compute_reward")
        async with server.running() as url:
            environment = RemoteEnvironment(url, "instance", retries=0)
            conversation = await play(environment, {"instance_hash": "abc"}, "stop")
            await environment.aclose()
        return conversation

    assert asyncio.run(run()).score.why == "remote: /compute_reward http_500"


def test_rewards_of_every_format_are_read() -> None:
    assert reward_of({"reward": 1}).value == 1
    assert reward_of({"f2p_count": 0, "f2p_total": 4}).value == 0
    assert reward_of({"f2p_count": 0, "f2p_total": 0}).is_missing
    assert reward_of({}).is_missing


def test_sessions_that_the_server_does_not_name_have_names_of_their_own() -> None:
    row = Row("r", ())
    conversations = [Conversation(row, seed, key) for seed in (1, 2) for key in ("r#0", "r#1")]
    names = [session_name(conversation) for conversation in conversations]
    assert len(set(names)) == 4 and names[0] == session_name(Conversation(row, 1, "r#0"))
