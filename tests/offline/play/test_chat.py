"""`upshot chat` in a real terminal: typed lines, streamed replies, forks with their rewards."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import wait_until
from upshot.cli import main
from upshot.core.conversation import Message
from upshot.models.base import Request
from upshot.models.connect import connect
from upshot.models.endpoint import EndpointModel
from upshot.offline.play.trees import clean
from upshot.serving.openai.server import OpenAIServer


class Tmux:
    """A terminal of 80 columns that runs a program."""

    def __init__(self, command: str, folder: Path) -> None:
        self.socket = str(folder / "tmux")
        self("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "60", "-c", str(folder), command)

    def __call__(self, *words: str) -> str:
        return subprocess.run(["tmux", "-S", self.socket, *words], capture_output=True, text=True).stdout

    def screen(self) -> str:
        return self("capture-pane", "-p", "-J", "-S", "-200")  # -J: lines as written, not as wrapped

    def type(self, line: str) -> None:
        self("send-keys", "-l", line)
        self("send-keys", "Enter")

    def wait_for(self, text: str, times: int = 1) -> str:
        wait_until(lambda: self.screen().count(text) >= times, 60)
        return self.screen()


@pytest.fixture
def terminal(run_folder: Path, tmp_path: Path) -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed, and the chat is driven through a terminal")
    words = f"env OMP_NUM_THREADS=1 TERM=screen {sys.executable} -m upshot.cli chat {run_folder}; cat"
    own = Tmux(words, tmp_path)
    yield own
    own("kill-server")


def test_a_chat_in_a_terminal(terminal: Tmux, tmp_path: Path) -> None:
    assert "its best checkpoint" in terminal.wait_for("you>")
    terminal.type("hello there")
    terminal.wait_for("tokens")
    terminal.type("/fork 2")
    tree = terminal.wait_for("/take K")
    assert tree.count("reward ") == 2 and "future 2" in tree and "verifier" in tree
    assert "goal (the model does not see it)" in tree and "missing" not in tree, "one's own words have no goal yet"
    terminal.type("/take 2")
    terminal.type("/score")
    terminal.wait_for("token_amount", times=4)
    terminal.type("/think")
    terminal.wait_for("thoughts are shown")
    terminal.type("/new")
    terminal.type("/user")
    heard = terminal.wait_for("user>")
    assert heard.count("goal (the model does not see it)") == 2
    terminal.type("/goal a hat")
    terminal.wait_for("expected one like")
    terminal.type("/goal {size: small, colour: red, thing: hat}")
    terminal.type("/nope")
    terminal.wait_for("unknown command '/nope'")
    terminal.type("/save talk.jsonl")
    terminal.wait_for("saved to talk.jsonl")
    saved = json.loads((tmp_path / "talk.jsonl").read_text())
    assert saved["messages"][0]["role"] == "user" and saved["goal"]["thing"] == "hat"
    terminal.type("/quit")


def test_lines_from_a_pipe_are_a_chat_too_and_a_mistake_is_one_line(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = run_folder / "checkpoints" / "rl-000002"
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/user\n/fork 2\n/score\n"))
    assert main(["chat", str(model), "--max-tokens", "3"]) == 0
    told = capsys.readouterr().out
    assert "there is no simulated user here" in told and "reply 2" in told and "token_amount" in told
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["chat", str(run_folder), "--checkpoint", "last"]) == 0
    assert "its checkpoint rl-000002" in capsys.readouterr().out
    assert main(["chat", str(model), "train.lr=1"]) == 2
    assert "overrides a recipe, but there is none" in capsys.readouterr().err


def test_an_unwritable_path_is_reported_and_the_chat_continues(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr("sys.stdin", io.StringIO("/save /proc/none/talk.jsonl\n/save here\n/save talk.jsonl\n"))
    assert main(["chat", str(run_folder)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "cannot write '/proc/none/talk.jsonl': no such file or directory; choose another FILE: /save FILE" in told
    assert "cannot write 'here': is a directory" in told and "saved to talk.jsonl" in told
    assert "Errno" not in told


def test_a_verdict_without_a_reference_is_refused_instead_of_zero(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = run_folder.parent / "qa.jsonl"
    questions.write_text("".join(json.dumps({"question": f"{n} ?", "answer": f"{n}"}) + "\n" for n in range(20)))
    lines = "hello\n/score\n/fork 1\n/reference hello\n/score\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    changes = [f"task.file={questions}", f"model.path={run_folder}", "episode.max_tokens=3"]
    assert main(["chat", str(run_folder), "--recipe", "grpo", *changes]) == 0
    told = capsys.readouterr().out
    assert told.count("your words have none") == 2 and told.count("verifier 0") == 1


def test_a_models_text_cannot_control_the_terminal() -> None:
    assert clean("a\x1b[31mred\x07\u202e b\n\tc") == "a[31mred b\n\tc"


def test_a_reply_from_an_endpoint_comes_in_pieces(run_folder: Path) -> None:
    """Our own server streams the reply; the pieces add up to it."""
    from upshot.core.http_listener import listen, serve_app
    from upshot.engine.engine import Engine
    from upshot.models.engine_model import EngineModel
    from upshot.models.local import load_whole

    async def talk() -> tuple[list[str], str]:
        module, tokenizer = load_whole(str(run_folder))
        server = OpenAIServer(EngineModel(Engine(module), tokenizer, "thimble"))
        with listen("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            serving = asyncio.create_task(serve_app(server.app, listener, drain_s=0))
            heard: list[str] = []
            async with connect(f"http://127.0.0.1:{port}/v1#thimble") as model:
                assert isinstance(model, EndpointModel)
                said = await model.stream(Request([Message("user", "hello")]), heard.append)
            serving.cancel()
        return heard, said.text

    heard, said = asyncio.run(talk())
    assert "".join(heard) == said and len(heard) > 1


def test_options_that_belong_to_the_recipe_are_refused(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(run_folder), "--user", "scripted:echo"]) == 2
    assert "--user: the recipe sets it" in capsys.readouterr().err


def test_a_chat_with_a_run_needs_no_training_data(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An imported SFT run names a task whose set is on the Hub; the chat does not need its training data."""
    shutil.copytree(run_folder, tmp_path / "sft")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/quit\n"))
    words = ["task.name=math-hard", "task.file=nowhere.parquet", "reward.metrics=[{name: token_amount}]"]
    words += ["futures.rounds=0", "episode.max_tokens=3"]
    assert main(["chat", str(tmp_path / "sft"), *words]) == 0
    assert "no rows to talk about: no file 'nowhere.parquet'" in capsys.readouterr().err
