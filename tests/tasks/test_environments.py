"""Third-party environments: Gymnasium's interface, MCP servers, verifiers."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.patience import patience, until
from tests.rollout.test_play import By
from tests.tasks.participants.speakers import in_turn
from tests.tiny import tiny_policy
from upshot.config.load import load_recipe
from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import UserError
from upshot.core.time_limit import call_seconds
from upshot.rewards.credit import MetricWeight
from upshot.rewards.metric import VerifierMetric
from upshot.rollout.episode import Policy
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import RolloutContext, play_step
from upshot.rollout.reply import Rollout
from upshot.rollout.services import assemble, build_services
from upshot.tasks.base import Task, tasks
from upshot.tasks.environments.mcp import AT_ONCE, McpSession, ServerGone
from upshot.tasks.users.scripted import ScriptedUser


class Countdown:
    """Gymnasium's interface: says a number, gives 1 for every step, ends at zero."""

    made: ClassVar[list[Countdown]] = []

    def __init__(self, last: int = 3) -> None:
        self.left, self.closed = last, False
        self.made.append(self)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        return f"{self.left} left", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        while self.left == 8:
            pass
        if self.left == 9:
            raise OSError("the board is on fire")
        self.left -= 1
        return f"{self.left} left", 1.0, self.left == 0, False, {}

    def close(self) -> None:
        self.closed = True


class Remote:
    """OpenEnv's interface: awaited, and a result with fields."""

    async def reset(self, seed: int) -> Any:
        return SimpleNamespace(observation={"echo": ""}, reward=None, done=False)

    async def step(self, action: Any) -> Any:
        return SimpleNamespace(observation={"echo": action["message"]}, reward=0.25, done=True)


def wrap(text: str) -> dict[str, str]:
    """The action of `Remote`."""
    if not text:
        raise ValueError("say something")
    return {"message": text}


def play(task: Task, max_turns: int = 5, group_size: int = 2) -> list[Rollout]:
    """One row, played with a policy of random words."""
    policy, _ = tiny_policy()
    futures = Talk({"verifier": VerifierMetric(task), "one": By(lambda _: 0.0)}, {"verifier": MetricWeight()})
    context = RolloutContext(policy, futures, task.environment(), max_turns=max_turns)
    [group] = asyncio.run(play_step(context, task.rows("train")[:1], group_size, 0))
    return group


def test_an_environment_with_gymnasiums_interface_opens_steps_and_rewards() -> None:
    Countdown.made.clear()
    task = tasks.create("gymnasium", {"env": f"{__name__}:Countdown", "episodes": 4, "system": "count"})
    replies = play(task)
    assert [reply.reward.means["verifier"].value for reply in replies] == [3.0, 3.0]
    assert [message.content for message in replies[0].conversation.messages][:2] == ["count", "3 left"]
    assert len(Countdown.made) == 2 and all(env.closed for env in Countdown.made), "one a conversation"
    assert len({env.seed for env in Countdown.made}) == 1, "the replies to a row are compared: they meet one seed"
    assert [reply.reward.means["verifier"].value for reply in play(task, max_turns=2)] == [2.0, 2.0], "so far"


def test_splits_share_no_seed() -> None:
    task = tasks.create("gymnasium", {"env": f"{__name__}:Countdown"})
    seeds = {split: {row.meta["seed"] for row in task.rows(split)} for split in ("train", "validation", "test")}
    assert all(len(found) == 256 for found in seeds.values())
    assert not seeds["train"] & (seeds["validation"] | seeds["test"]) and not seeds["validation"] & seeds["test"]


@pytest.mark.parametrize(
    ("last", "reason", "why"), [(9, "error", "the board is on fire"), (8, "timeout", "Countdown took more than 0.5 s")]
)
def test_an_environment_that_raises_or_hangs_costs_only_its_episode(last: int, reason: str, why: str) -> None:
    task = tasks.create("gymnasium", {"env": f"{__name__}:Countdown", "arguments": {"last": last}})
    before = call_seconds.set(0.5)
    try:
        replies = play(task)
    finally:
        call_seconds.reset(before)
    for reply in replies:
        assert reply.reward.total.reason == reason and why in reply.reward.total.why
    assert all(env.closed for env in Countdown.made)


def test_an_environment_in_openenvs_form_is_awaited_and_its_action_made() -> None:
    options = {"env": f"{__name__}:Remote", "action": f"{__name__}:wrap"}
    for reply in play(tasks.create("openenv", options)):
        assert reply.reward.means["verifier"].value == 0.25
        said = [turn.message.content for turn in reply.conversation.turns]
        assert said[0] == json.dumps({"echo": ""})


OPENENV = """
import sys, uvicorn
from openenv.core.env_server import Environment, create_fastapi_app
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    word: str

class Seen(Observation):
    text: str = ""

class Room(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.seed, self.left = seed, 2
        return Seen(text=f"room {seed}", reward=0.0, done=False)

    def step(self, action, timeout_s=None, **_):
        self.left -= 1
        return Seen(text=f"room {self.seed}: {self.left} left", reward=0.5, done=self.left == 0)

    @property
    def state(self):
        return State()

uvicorn.run(create_fastapi_app(Room, Say, Seen, max_concurrent_envs=16), port=int(sys.argv[1]), log_level="error")
"""


def as_word(text: str) -> dict[str, str]:
    """The action of `Room`."""
    return {"word": text or "-"}


def text_seen(seen: dict[str, Any]) -> str:
    """What `Room` shows."""
    return str(seen["text"])


@pytest.mark.timeout(600)
def test_a_real_openenv_server_has_a_session_per_conversation_and_losing_one_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("openenv.core", reason="pip install openenv-core")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "room.py").write_text(OPENENV)
    with subprocess.Popen([sys.executable, str(tmp_path / "room.py"), str(port)]) as server:
        try:
            asyncio.run(until(lambda: is_open(port)))
            options = {"env": "openenv.core:GenericEnvClient", "arguments": {"base_url": f"http://127.0.0.1:{port}"}}
            own = {"action": f"{__name__}:as_word", "show": f"{__name__}:text_seen"}
            task = tasks.create("openenv", {**options, **own, "episodes": 2})
            seed = task.rows("train")[0].meta["seed"]
            for reply in play(task, group_size=4):
                assert reply.reward.means["verifier"].value == 1.0
                heard = [message.content for message in reply.conversation.messages if message.role == "user"]
                assert heard[:2] == [f"room {seed}", f"room {seed}: 1 left"], "steps of no other session"
        finally:
            server.kill()
        server.wait()
        assert all(reply.reward.total.is_missing for reply in play(task)), "a server that is gone is no score of 0"


def is_open(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def test_a_real_gymnasium_environment_runs() -> None:
    pytest.importorskip("gymnasium", reason="pip install gymnasium")
    task = tasks.create("gymnasium", {"env": "FrozenLake-v1", "action": "number", "episodes": 2})
    assert all(reply.reward.means["verifier"].value is not None for reply in play(task))


def test_a_real_textarena_game_runs() -> None:
    pytest.importorskip("textarena", reason="pip install textarena")
    task = tasks.create("gymnasium", {"env": "textarena:GuessTheNumber-v0", "episodes": 2})
    assert all(reply.reward.means["verifier"].value is not None for reply in play(task))


SERVER = """
import json, os, sys
from collections import defaultdict

TOOL = {"name": "note", "description": "Keep a note; tells all that were kept.", "inputSchema": {
    "type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}}
kept = defaultdict(list)

def call(text, session):
    if text == "die":
        os._exit(1)
    if text == "bad":
        return {"content": [{"type": "text", "text": "no such note"}], "isError": True}
    said = kept[session]
    said.append(text)
    return {"content": [{"type": "text", "text": " ".join(said)}], "isError": False}

def answer_to(asked, session=""):
    method, given = asked["method"], asked.get("params") or {}
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    if method == "initialize":
        answer["result"] = {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}},
                            "serverInfo": {"name": "notes", "version": "1"}}
    elif method == "tools/list":
        answer["result"] = {"tools": [TOOL]}
    elif method == "tools/call" and not isinstance(given["arguments"]["text"], str):
        answer["error"] = {"code": -32602, "message": "a note is a text"}
    elif method == "tools/call":
        answer["result"] = call(given["arguments"]["text"], session)
    else:
        answer["error"] = {"code": -32601, "message": "no such method"}
    return answer

for line in sys.stdin if len(sys.argv) == 1 else ():
    asked = json.loads(line)
    if "id" in asked:
        print(json.dumps(answer_to(asked)), flush=True)
"""
"""A server without the library, whose sessions start two hundred times as fast."""
HTTP = f"""{SERVER}
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = self.headers.get("Mcp-Session-Id") or os.urandom(8).hex()
        body = json.dumps(answer_to(asked, session)).encode() if "id" in asked else b""
        self.send_response(200 if body else 202)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if asked["method"] == "initialize":
            self.send_header("Mcp-Session-Id", session)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send_error(405)

    do_DELETE = do_GET

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""The same over HTTP, with a separate session for each client."""


@pytest.fixture(scope="module", params=["its input and output", "HTTP"])
def notes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Task]:
    """A task whose server keeps notes, reached in either way."""
    file = tmp_path_factory.mktemp("mcp") / "notes.py"
    data = file.with_name("rows.jsonl")
    data.write_text(json.dumps({"question": "?", "answer": "1"}) + "\n")
    options = {"train_file": str(data), "verifier": "gsm8k", "describe": True}
    if request.param != "HTTP":
        file.write_text(SERVER)
        yield tasks.create("mcp", {"server": f"{sys.executable} -I -S {file}", **options})
        return
    file.write_text(HTTP)
    with subprocess.Popen([sys.executable, str(file), "http"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield tasks.create("mcp", {"server": f"http://127.0.0.1:{int(server.stdout.readline())}/mcp", **options})
        finally:
            server.kill()


def called(text: Any) -> Message:
    return Message("assistant", f"<tool_call>{json.dumps({'name': 'note', 'arguments': {'text': text}})}</tool_call>")


async def talk_with(task: Task, *texts: Any) -> list[str]:
    """The server's answers to a series of calls in one session."""
    environment = task.environment()
    assert environment is not None
    conversation = Conversation(Row("r", ()))
    await environment.start(conversation)
    heard = []
    try:
        for text in texts:
            conversation.say(called(text))
            observation = await environment.observe(conversation)
            heard += [message.content for message in observation.messages]
    finally:
        await environment.end(conversation)
    return heard


def test_tools_come_from_the_servers_list_and_a_session_belongs_to_one_conversation(notes: Task) -> None:
    [tool] = notes.tools()
    assert tool["function"]["name"] == "note" and tool["function"]["parameters"]["required"] == ["text"]
    assert "Keep a note" in notes.rows("train")[0].messages[0].content, "described where the template shows no tools"

    async def together() -> list[list[str]]:
        return list(await asyncio.gather(talk_with(notes, "a", "bad", 7, "b"), talk_with(notes, "c", "d")))

    first, second = asyncio.run(together())
    assert (first[0], first[3]) == ("a", "a b") and second == ["c", "c d"], "no note of another's"
    assert "no such note" in first[1] and "a note is a text" in first[2], "what a server refuses is heard"


def test_calls_of_many_conversations_in_one_mcp_session_wait_for_their_turn_outside_their_time() -> None:
    class SlowClient:
        """Answers one call after the other."""

        def __init__(self) -> None:
            self.under_way = self.most = 0

        async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(0.001)
            self.under_way -= 1
            return SimpleNamespace(content=[SimpleNamespace(text=arguments["n"], type="text")], is_error=False)

    async def ask() -> tuple[list[str], int]:
        session, client = McpSession("nowhere", patience(10)), SlowClient()
        session._client = client
        return await asyncio.gather(*(session.call("count", {"n": str(n)}) for n in range(200))), client.most

    answers, most = asyncio.run(ask())
    assert answers == [str(n) for n in range(200)] and most == AT_ONCE


def test_a_slow_call_leaves_an_mcp_session_open_and_a_lost_connection_ends_it() -> None:
    class Failing:
        """Never answers one tool, and loses its connection at another."""

        async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
            if name == "lost":
                raise ConnectionError("closed")
            await asyncio.sleep(3600)

    async def ask(name: str) -> tuple[str, bool]:
        session = McpSession("nowhere", 0.01)
        session._client = Failing()
        with pytest.raises(ServerGone) as gone:
            await session.call(name, {})
        return str(gone.value.reason), session.is_over

    assert asyncio.run(ask("slow")) == ("timeout", False)
    assert asyncio.run(ask("lost")) == ("crashed", True)


def test_an_mcp_server_that_goes_away_makes_that_episode_missing_and_no_other(notes: Task) -> None:
    """Two episodes of a row with the user beside the tools; one of them loses its server in the middle."""
    policy = Policy(in_turn(called("a").content, called("die").content, called("b").content, "#### 1"))
    over_http = "http" in notes.environment().server  # type: ignore[union-attr]
    user = assemble(notes, {}, user=ScriptedUser(["go on"])).user
    futures = Talk({"verifier": VerifierMetric(notes)}, {"verifier": MetricWeight()})
    context = RolloutContext(policy, futures, user, max_turns=5)
    [[reply]] = asyncio.run(play_step(context, notes.rows("train"), 1, 0))
    assert reply.reward.total.reason == "crashed" and "the MCP server" in reply.reward.total.why
    assert [message.content for message in reply.conversation.messages if message.role == "tool"] == ["a"]
    assert reply.credit is not None and not reply.credit.trains
    if not over_http:  # a process belongs to one episode; a shared server is gone for all
        context.policy = Policy(in_turn(called("a").content, "#### 1"))
        [[again]] = asyncio.run(play_step(context, notes.rows("train"), 1, 1))
        assert again.reward.total.value == 1.0


def test_futures_that_would_call_the_tools_of_a_session_are_refused_before_any_work(notes: Task) -> None:
    base = {"task": {"name": "mcp", "server": "x"}, "futures": {"rounds": 1, "user": {"name": "scripted"}}}
    with pytest.raises(UserError, match=r"copied with their session; set futures.rounds=0, or task.shared=true"):
        build_services(load_recipe({**base, "reward": {"metrics": ["verifier"]}}, []).recipe, notes, in_turn("x"))


def test_an_mcp_server_that_is_not_there_is_refused_before_any_work() -> None:
    task = tasks.create("mcp", {"server": "no-such-server --quick", "seconds": 5.0})
    with pytest.raises(UserError, match=r"task.server: the MCP server 'no-such-server --quick' did not start"):
        task.tools()


TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def spoke(self, trace: vf.Trace) -> float:
        return 1.0

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for n in range(20):
            yield Sum(Data(prompt=f"i want a lamp {n}", answer=str(2 * n)), self.config.task)

__all__ = ["Sums"]
"""


def test_an_environment_of_verifiers_plays_itself_and_gives_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verifiers.v1", reason="pip install verifiers uv")
    from upshot.config.recipe import AgentConfig
    from upshot.rollout.agents.runner import AgentRunner

    (tmp_path / "sums_for_upshot").mkdir()
    (tmp_path / "sums_for_upshot" / "__init__.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    task = tasks.create("verifiers", {"env": "sums_for_upshot"})
    assert {split: len(task.rows(split)) for split in ("train", "validation", "test")}["train"] == 16
    policy, _ = tiny_policy()
    futures = Talk({"verifier": VerifierMetric(task)}, {"verifier": MetricWeight()})

    async def run() -> list[list[Rollout]]:
        agent = AgentRunner(AgentConfig(program="verifiers"), policy.model.tokenizer, task.agent())
        await agent.start()
        try:
            return await play_step(RolloutContext(policy, futures, agent=agent), task.rows("train")[:2], 2, 0)
        finally:
            await agent.aclose()

    for group in asyncio.run(run()):
        for reply in group:
            assert reply.reward.total.value == 0.5
            assert reply.conversation.messages[0].content.startswith("i want a lamp")
            assert [sample.ids for sample in reply.conversation.samples()]
    assert task._environment._interception is None, "its proxy keeps a client for every episode: none outlives the step"


def test_without_the_library_the_task_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(UserError, match="pip install 'verifiers"):
        tasks.create("verifiers", {"env": "gsm8k"}).rows("train")
