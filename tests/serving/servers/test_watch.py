"""Servers start together, restart after a crash, and none is left behind. A stand-in plays vLLM."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import patience, wait_until
from tests.serving.servers.started import Started, alive
from upshot.cli import main
from upshot.rollout.futures.classmates.map_file import read_map
from upshot.serving.servers.state import is_up, read_state

Write = Callable[[str], Path]
TWO = "servers: {a: {model: org/a, engine: vllm}, b: {model: org/b, engine: vllm}}"


def child_of(folder: Path, name: str) -> int:
    return int((folder / f"{name}.child").read_text() or 0)


def test_a_killed_server_is_back_on_its_port_with_its_children_replaced(serve_file: Write, tmp_path: Path) -> None:
    started = Started(serve_file(TWO))
    before = started.ready()["servers"]
    child = child_of(tmp_path, "a")
    os.kill(before["a"]["pid"], signal.SIGKILL)
    wait_until(lambda: (state := read_state(started.folder)) and state["servers"]["a"]["restarts"] == 1)
    after = started.ready()["servers"]
    assert after["a"]["url"] == before["a"]["url"] and after["a"]["pid"] != before["a"]["pid"]
    assert after["b"] == before["b"]
    assert not alive(child)
    said = started.end()
    assert re.search(r"a was ended by SIGKILL; starting it again in 0.5 s .*\na is back after", said)
    left = [after["a"]["pid"], after["b"]["pid"], child_of(tmp_path, "a"), child_of(tmp_path, "b")]
    assert started.process.returncode == 0 and not any(map(alive, left))


def test_a_killed_parent_leaves_no_server_and_no_child_of_one(serve_file: Write, tmp_path: Path) -> None:
    started = Started(serve_file(TWO))
    state = started.ready()
    pids = [server["pid"] for server in state["servers"].values()]
    pids += [child_of(tmp_path, "a"), child_of(tmp_path, "b")]
    assert all(map(alive, pids))
    started.end(signal.SIGKILL)
    wait_until(lambda: not any(map(alive, pids)) and not is_up(started.folder), 10)


def test_an_interrupt_while_they_start_stops_all(serve_file: Write, tmp_path: Path) -> None:
    started = Started(serve_file(TWO))
    pid = wait_until(lambda: (tmp_path / "a.child").exists() and child_of(tmp_path, "a"))
    said = started.end(signal.SIGINT)
    assert started.process.returncode == 0 and said.endswith("all stopped\n")
    assert not alive(pid) and not is_up(started.folder)


def test_a_server_that_never_gets_ready_ends_the_start_with_its_last_output(serve_file: Write, tmp_path: Path) -> None:
    started = Started(serve_file(TWO.replace("org/a,", "org/a, environment: {FAKE_FAILS: 9},")))
    said = started.process.communicate()[0]
    assert started.process.returncode == 2
    assert "server 'a' exited with code 1;" in said and "CUDA is on holiday" in said and "Traceback" not in said
    assert not is_up(started.folder)


def test_a_server_that_stops_answering_is_restarted(serve_file: Write, tmp_path: Path) -> None:
    hung = patience(0.2)
    started = Started(serve_file(f"hung_s: {hung}\nservers: {{a: {{model: org/a, engine: vllm}}}}"))
    pid = started.ready()["servers"]["a"]["pid"]
    (tmp_path / "a.hung").touch()
    wait_until(lambda: not alive(pid))
    (tmp_path / "a.hung").unlink()
    wait_until(lambda: (state := read_state(started.folder)) and state["servers"]["a"]["restarts"])
    started.ready()
    assert f"a did not answer for {hung:g} s" in started.end()


def test_the_map_names_the_servers_as_classmates(serve_file: Write, tmp_path: Path) -> None:
    started = Started(serve_file(TWO), "--map", "map.json", UPSHOT_API_KEY="secret")
    state = started.ready()
    specs, classmates = read_map("map.json")
    assert [classmate.name for classmate in classmates] == ["org/a", "org/b"]
    assert (specs["org/a"].url, specs["org/a"].model) == (state["servers"]["a"]["url"], "a")
    assert specs["org/a"].api_key_env == "UPSHOT_API_KEY"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{specs['org/a'].url}/models")
    asked = urllib.request.Request(f"{specs['org/a'].url}/models", headers={"Authorization": "Bearer secret"})
    assert json.load(urllib.request.urlopen(asked))["data"][0]["id"] == "a"
    for file in started.folder.iterdir():
        assert "secret" not in file.read_text()
    started.end()
    assert {entry["status"] for entry in json.loads((tmp_path / "map.json").read_text()).values()} == {"stopped"}


def test_replicas_are_one_classmate_of_the_map_and_all_of_them_are_called(serve_file: Write, tmp_path: Path) -> None:
    started = Started(serve_file("servers: {a: {model: org/a, engine: vllm, replicas: 2}}"), "--map", "map.json")
    state = started.ready()
    specs, classmates = read_map("map.json")
    assert [classmate.name for classmate in classmates] == ["org/a"]
    assert specs["org/a"].kind == "replicas" and specs["org/a"].model == "a"
    assert specs["org/a"].url == tuple(server["url"] for server in state["servers"].values())
    started.end()
    assert json.loads((tmp_path / "map.json").read_text())["org/a"]["status"] == "stopped"


def test_status_shows_the_servers_and_stop_ends_them(serve_file: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = serve_file(TWO)
    assert main(["serve", "status"]) == 1 and main(["serve", "stop", str(file)]) == 0
    assert "nothing to stop" in capsys.readouterr().out
    started = Started(file)
    url = started.ready()["servers"]["b"]["url"]
    assert main(["serve", "status"]) == 0
    told = capsys.readouterr().out
    assert re.search(rf"b +running +vllm +CPU +{re.escape(url)} +\d+ ", told)
    assert main(["serve", str(file)]) == 2
    assert "are already running (process" in capsys.readouterr().err
    assert main(["serve", "stop"]) == 0
    assert started.process.wait() == 0 and main(["serve", "status", str(file)]) == 1


def test_a_server_that_cannot_start_is_refused_before_any_other_starts(
    serve_file: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refusal(text: str, *words: str) -> str:
        assert main(["serve", str(serve_file(text)), *words]) == 2
        return capsys.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = refusal(f"servers: {{a: {{model: x, engine: vllm, port: {port}}}}}")
    assert f"servers.a: cannot listen on 127.0.0.1:{port}: Address already in use" in told
    assert "no program 'nowhere'" in refusal("servers: {a: {model: x, engine: vllm, program: nowhere}}")
    assert "--port applies only to `upshot serve MODEL`" in refusal(TWO, "--port", "1")
    assert "--tool-parser applies only to `upshot serve MODEL`" in refusal(TWO, "--tool-parser", "hermes")
    assert "a map is keyed by model" in refusal("servers: {a: x, b: x}", "--map", "m.json")
    assert main(["serve", "smollm2-135m", "--map", "m.json"]) == 2
    assert not (tmp_path / "a").exists()


def test_a_second_file_with_a_taken_port_is_refused_without_harm(serve_file: Write, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = f"servers: {{a: {{model: org/a, engine: vllm, port: {port}}}}}"
    started, second = Started(serve_file(text)), tmp_path / "second.yaml"
    started.ready()
    second.write_text(text)
    other = Started(second)
    said = other.process.communicate()[0]
    assert other.process.returncode == 2 and f"servers.a: cannot listen on 127.0.0.1:{port}" in said
    assert started.ready()["pid"] == started.process.pid and started.end().endswith("all stopped\n")


def test_a_server_that_keeps_crashing_is_restarted_with_growing_pauses(serve_file: Write, tmp_path: Path) -> None:
    started = Started(serve_file(TWO))
    before = started.ready()["servers"]
    (tmp_path / "a.fails").touch()
    os.kill(before["a"]["pid"], signal.SIGKILL)
    wait_until(lambda: (state := read_state(started.folder)) and state["servers"]["a"]["restarts"] == 3)
    assert main(["serve", "status", str(started.file)]) == 1
    (tmp_path / "a.fails").unlink()
    after = started.ready()["servers"]
    assert after["b"]["pid"] == before["b"]["pid"]
    assert re.findall(r"starting it again in (\S+) s", started.end())[:3] == ["0.5", "1", "2"]


def test_a_full_disk_is_reported_and_ends_no_server(serve_file: Write, tmp_path: Path) -> None:
    file = serve_file(TWO)
    started = Started(file)
    before = started.ready()["servers"]
    soft = resource.prlimit(started.process.pid, resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
    os.kill(before["a"]["pid"], signal.SIGKILL)
    wait_until(lambda: "asked" if (tmp_path / "a").read_text() == "2" else None)
    assert started.process.poll() is None and alive(before["b"]["pid"])
    resource.prlimit(started.process.pid, resource.RLIMIT_FSIZE, soft)
    said = started.end()
    assert "a is restarting, but that cannot be written: File too large" in said and said.endswith("all stopped\n")
    assert started.process.returncode == 0 and "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_while_they_start_leaves_nothing(serve_file: Write, tmp_path: Path, number: int) -> None:
    started = Started(serve_file(TWO))
    pid = wait_until(lambda: (tmp_path / "b.child").exists() and child_of(tmp_path, "b"))
    said = started.end(number)
    assert started.process.returncode == 0 and said.endswith("all stopped\n") and not alive(pid)


def test_a_signal_is_handled_before_the_first_server_starts(serve_file: Write) -> None:
    code = (
        "import os, signal, sys\n"
        "from upshot.cli import main\n"
        "from upshot.serving.servers.server import ModelServer\n"
        "start = ModelServer.start\n"
        "async def signalled(self, within_s):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await start(self, within_s)\n"
        "ModelServer.start = signalled\n"
        "sys.exit(main(['serve', sys.argv[1]]))\n"
    )
    file = serve_file("servers: {a: {model: org/a, engine: vllm}}")
    ran = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and ran.stdout.endswith("all stopped\n"), ran
