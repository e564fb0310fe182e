"""A task behind HTTP, trained from its first call to its reward, with the protocol gen_chat."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_parts
from tests.training.workshop import metrics, recipe
from upshot.cli import main
from upshot.config.load import dump_recipe
from upshot.core.errors import UserError
from upshot.core.http_client import AttemptError
from upshot.core.score import Reason, Score
from upshot.run.run import train
from upshot.tasks.environments.remote import RemoteEnvironment, RemoteError, RemoteTask


class Chat(BaseHTTPRequestHandler):
    """Opens every sample, answers once, then finishes with a reward."""

    asked: list[str] = []  # noqa: RUF012 - one server a test
    turns: dict[str, int] = {}  # noqa: RUF012 - by session, what was said in it

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append(self.path)
        answer: dict[str, Any] = {}
        if self.path == "/start_sample":
            answer = {"messages": [{"role": "user", "content": "hello"}], "tools": []}
        elif self.path == "/interact":
            session = self.headers["session_id"]
            type(self).turns[session] = said = type(self).turns.get(session, 0) + len(body["messages"])
            spoken = [] if said > 1 else [{"role": "user", "content": "and then"}]
            words = len(body["messages"][-1]["content"].split())
            answer = {"messages": spoken, "finish": said > 1, "reward": words / 10 if said > 1 else None}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def chat() -> Iterator[str]:
    Chat.asked, Chat.turns = [], {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def saved_model(folder: Path) -> str:
    module, tokenizer, _, _ = tiny_parts()
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_chat_that_the_server_opens_is_trained(tmp_path: Path, chat: str, capsys: pytest.CaptureFixture[str]) -> None:
    own = {
        "model": {"path": saved_model(tmp_path / "model")},
        "task": {"name": "remote", "protocol": "chat", "url": chat, "samples": 20, "sample_name": "gen"},
        "episode": {"max_tokens": 4, "max_turns": 3},
        "futures": {"samples": 1, "rounds": 0},
        "reward": {"metrics": [{"name": "verifier"}]},
    }
    given = recipe(tmp_path / "run", warm=False, steps=2, prompts_per_step=2, group_size=4, more=own)
    (tmp_path / "remote.yaml").write_text(dump_recipe(given))
    assert main(["train", str(tmp_path / "remote.yaml"), "--dry-run"]) == 0
    assert "16 training rows" in capsys.readouterr().out
    train(given)
    [first, second] = metrics(tmp_path / "run")
    assert first["reward/missing"] == 0 and second["step"] == 2
    assert Chat.asked.count("/start_sample") == 16 and Chat.asked.count("/interact") == 32


def test_rows_that_the_server_opens_have_no_goal_and_are_still_split() -> None:
    task = RemoteTask("http://127.0.0.1:1", samples=20, sample_name="gen")
    rows = task.all_rows()
    assert all(row.goal is None and row.messages == () for own in rows.values() for row in own)
    assert {split: len(own) for split, own in rows.items()} == {"train": 16, "validation": 2, "test": 2}
    assert len({row.id for own in rows.values() for row in own}) == 20


def test_more_turns_than_one_need_somebody_who_answers_between_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"episode\.max_turns is 3.*task 'slots' has no environment"):
        train(recipe(tmp_path / "run", more={"episode": {"max_tokens": 4, "max_turns": 3}}))
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe(tmp_path / "run", more={"episode": {"max_turns": 3}})))
    assert main(["train", str(tmp_path / "r.yaml"), "--dry-run"]) == 2
    assert "episode.max_turns is 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("retry", "begun", "reason"),
    [
        (True, True, Reason.CONNECTION),
        (False, False, Reason.CONNECTION),
        (False, True, Reason.CRASHED),
    ],
)
def test_only_a_server_lost_during_an_action_may_be_blamed_on_the_policy(
    retry: bool, begun: bool, reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = RemoteEnvironment("http://127.0.0.1:9")

    async def lost(*_: object, **__: object) -> None:
        raise AttemptError("connection", "reset by peer", begun=begun)

    monkeypatch.setattr(environment.client, "request", lost)
    with pytest.raises(RemoteError) as raised:
        asyncio.run(environment._post("/interact", {}, retry=retry))
    assert Score.failed(raised.value, "environment").reason is reason
