"""The live page's server: who may send requests, what it answers, what it reports of a growing run."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.run.report.test_report import two_runs
from upshot.core.files import append_jsonl
from upshot.run.report.server import RunWatch, make_app


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return two_runs(tmp_path / "runs")


async def read_all(watch: RunWatch) -> None:
    """Follow until there is nothing new."""
    following = asyncio.create_task(watch.run())
    while not all(len(run.replies) == 2 for run in watch.shown.runs.values()):
        await asyncio.sleep(0.01)
    following.cancel()


def test_only_requests_of_a_page_are_answered(runs: Path) -> None:
    with TestClient(make_app([runs]), base_url="http://127.0.0.1") as client:
        page = client.get("/")
        assert page.headers["x-frame-options"] == "DENY" and "connect-src 'self'" in page.text
        assert [run["name"] for run in client.get("/page").json()["runs"]] == ["one", "two"]
        while len(client.get("/replies", params={"run": "two"}).json()["columns"]["step"]) < 2:
            pass
        assert client.get("/replies", params={"run": "two", "start": 1}).json()["columns"]["key"] == ["r4#0"]
        assert client.get("/reply", params={"run": "two", "at": 1}).json()["goal"] == "the goal of two"
        assert client.get("/find", params={"run": "two", "words": "TWO 4"}).json() == [1]
        for wrong in ("/reply?run=two&at=2", "/reply?run=../one&at=0", "/replies?run=three", "/recipe.yaml", "/docs"):
            assert client.get(wrong).status_code == 404, wrong
        assert client.post("/page", json={}).status_code == 405
        assert client.get("/page").headers["x-content-type-options"] == "nosniff"


def test_without_a_token_only_a_loopback_name_is_answered(runs: Path) -> None:
    app = make_app([runs])
    with TestClient(app, base_url="http://evil.example") as client:
        assert client.get("/page").status_code == 403 and client.get("/").status_code == 403


def test_with_a_token_requests_without_it_are_refused(runs: Path) -> None:
    with TestClient(make_app([runs], "secret-token"), base_url="http://10.0.0.7") as client:
        assert client.get("/").status_code == client.get("/page").status_code == 401
        assert client.get("/?token=wrong").status_code == 401
        assert client.get("/?token=secret%0d%0aSet-Cookie:x").status_code == 401
        assert "x" not in client.cookies
        opened = client.get("/?token=secret-token")
        assert opened.status_code == 200 and str(opened.url) == "http://10.0.0.7/", "the address is without the token"
        assert client.get("/page").status_code == 200


def test_a_growing_run_and_a_new_run_are_reported(runs: Path) -> None:
    watch = RunWatch([runs])
    asyncio.run(read_all(watch))
    before, page = watch.state(), json.loads(watch.page())
    assert before["replies"] == {"one": [0, 2], "two": [0, 2]} and page["version"] == before["version"]
    append_jsonl(runs / "two" / "metrics.jsonl", [{"phase": "rl", "step": 5, "reward/mean": 0.9}])
    (runs / "three").mkdir()
    (runs / "three" / "recipe.yaml").write_text("name: recipe-three\n")
    watch.shown.look()
    head, replies = watch.shown.runs["two"].follow()
    assert head and not replies and watch.shown.runs["two"].curves.last("reward/mean") == 0.9
    assert list(watch.shown.runs) == ["one", "two", "three"]


def test_the_first_event_is_the_state_and_the_next_one_comes_with_a_change(runs: Path) -> None:
    async def listen() -> list[str]:
        watch = RunWatch([runs])
        events = watch.events()
        first = await anext(events)
        watch.version += 1
        return [first, await anext(events)]

    told = [json.loads(event.removeprefix("data: ")) for event in asyncio.run(listen())]
    assert [state["version"] for state in told] == [0, 1]


def test_the_verb_serves_until_it_is_stopped(runs: Path) -> None:
    command = [sys.executable, "-m", "upshot.cli", "view", str(runs), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        try:
            address = served.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(f"{address}page") as answer:
                assert json.load(answer)["title"] == "2 runs: recipe-one, recipe-two"
        finally:  # a failing assertion would otherwise wait for the server forever
            served.send_signal(signal.SIGTERM)
        assert served.wait() == 0
