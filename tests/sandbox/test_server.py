# ruff: noqa: E501 (the programs are one line each)
"""The HTTP API as a user meets it, and the interchangeable clients."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from tests.patience import wait_until
from tests.sandbox.conftest import soon
from upshot.core.errors import UserError
from upshot.sandbox import Limits, Outcome, Sandbox, StdioTest, connect
from upshot.sandbox.http.server import build_app, serve
from upshot.sandbox.local import languages
from upshot.sandbox.local.script_runner import ScriptRunner
from upshot.sandbox.outcome import RunResult

REPOSITORY = Path(__file__).parents[2]
ADD = "def add(a, b):\n    return a + b"
JSON = {"Content-Type": "application/json"}
START = "import sys; from upshot.cli import main; sys.exit(main(sys.argv[1:]))"


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start_server(*options: str, environment: dict[str, str] | None = None) -> tuple[subprocess.Popen[bytes], str]:
    """`upshot sandbox` in a separate process, once it answers."""
    port = free_port()
    command = [sys.executable, "-c", START, "sandbox", "--port", str(port), "--slots", "4", *options]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env={**os.environ, **(environment or {})}, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return get(url + "/health").status_code == 200
        return False

    wait_until(answers, pause=0.1)
    return process, url


def get(url: str, **options: Any) -> httpx.Response:
    """One GET request without a time limit of its own."""
    return httpx.get(url, timeout=None, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    process, url = start_server("--queue", "8", "--max-request-mb", "1")
    yield url
    process.send_signal(signal.SIGTERM)
    process.wait()


def post(url: str, path: str, body: Any, **options: Any) -> httpx.Response:
    """One POST request."""
    return httpx.post(url + path, json=body, timeout=None, **options)


def test_the_three_examples_of_the_classmate_readme_work(server: str) -> None:
    health = get(server + "/health").json()
    assert health["status"] == "healthy" and set(health["layers"]) == {
        "namespaces",
        "landlock",
        "seccomp",
        "uid",
        "cgroup",
    }
    tests = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(0, 0) == 1"]
    answer = post(server, "/test_program", {"program": ADD, "tests": tests, "max_execution_time": 1.0}).json()
    assert answer["results"] == [1, 1, 0] and answer["runtimes"][2] == -1 and answer["runtimes"][0] >= 0
    stdio = [{"input": "1\n", "output": "2\n"}, {"input": "100\n", "output": "101\n"}]
    body = {"program": "a = int(input())\nprint(a + 1)", "tests": stdio, "max_execution_time": 1.0}
    assert post(server, "/test_program_stdio", body).json()["results"] == [1, 1]


def test_run_code_answers_in_sandbox_fusions_fields(server: str) -> None:
    files = {"data/in.txt": base64.b64encode(b"hello").decode()}
    code = "import sys\nprint(open('data/in.txt').read(), input())\nopen('out.txt', 'w').write('bye')\nprint('warn', file=sys.stderr)"
    body = {
        "code": code,
        "language": "python",
        "stdin": "there",
        "files": files,
        "fetch_files": ["out.txt"],
        "run_timeout": 2,
    }
    answer = post(server, "/run_code", body).json()
    assert answer["status"] == "Success" and answer["compile_result"] is None
    run = answer["run_result"]
    assert (run["status"], run["return_code"], run["stdout"], run["stderr"]) == (
        "Finished",
        0,
        "hello there\n",
        "warn\n",
    )
    assert base64.b64decode(answer["files"]["out.txt"]) == b"bye"
    late = post(server, "/run_code", {"code": "while True: pass", "run_timeout": 0.3}).json()
    assert late["status"] == "Failed" and late["run_result"]["status"] == "TimeLimitExceeded"
    failed = post(server, "/run_code", {"code": "raise SystemExit(3)"}).json()
    assert failed["status"] == "Failed" and failed["run_result"]["return_code"] == 3


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("bash", "read x; echo $((x + 1))"),
        ("nodejs", "const l = require('fs').readFileSync(0, 'utf8'); console.log(parseInt(l) + 1)"),
        ("c", '#include <stdio.h>\nint main() { int x; scanf("%d", &x); printf("%d\\n", x + 1); }'),
        ("cpp", "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << x + 1; }"),
        (
            "rust",
            'use std::io; fn main() { let mut s = String::new(); io::stdin().read_line(&mut s).unwrap(); println!("{}", s.trim().parse::<i32>().unwrap() + 1); }',
        ),
        (
            "java",
            "import java.util.*; public class Main { public static void main(String[] a) { System.out.println(new Scanner(System.in).nextInt() + 1); } }",
        ),
        ("go", 'package main\nimport "fmt"\nfunc main() { var x int; fmt.Scan(&x); fmt.Println(x + 1) }'),
    ],
)
def test_other_languages_run_where_they_are_installed(language: str, code: str, server: str) -> None:
    answer = post(
        server,
        "/run_code",
        {"code": code, "language": language, "stdin": "41\n", "run_timeout": 10, "compile_timeout": 60},
    )
    if language not in languages.list_installed():
        assert answer.status_code == 400 and "not installed" in answer.json()["error"]
        pytest.skip(f"{language} is not installed")
    if "needs namespaces" in answer.text:
        pytest.skip(answer.text)
    assert answer.json()["run_result"]["stdout"].strip() == "42", answer.json()


def test_a_program_that_does_not_compile_is_reported_as_such(server: str) -> None:
    if "c" not in languages.list_installed():
        pytest.skip("no C compiler")
    answer = post(server, "/run_code", {"code": "int main( {", "language": "c"}).json()
    assert (
        answer["status"] == "Failed" and answer["run_result"] is None and "error" in answer["compile_result"]["stderr"]
    )


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/test_program", {"tests": []}, "field 'program' is missing"),
        ("/test_program", {"program": "x", "tests": "assert"}, "field 'tests' is 'assert'; it must be a valid list"),
        ("/test_program", {"program": "x", "tests": [], "max_execution_time": -1}, "must be greater than 0"),
        ("/test_program", {"program": "x", "tests": [], "max_execution_time": 1e9}, "less than or equal to 300"),
        ("/test_program", {"program": "x", "tests": [], "limits": {"memry_mb": 1}}, "did you mean 'memory_mb'"),
        (
            "/test_program",
            {"program": "x", "tests": [], "limits": {"memory_mb": "big"}},
            "must be a whole number above 0",
        ),
        ("/test_program", {"program": "x", "tests": [], "limits": {"memory_mb": 10**9}}, "at most 16384"),
        ("/test_program", {"program": "x", "tests": [], "limits": 3}, "must be an object"),
        ("/test_program_stdio", {"program": "x", "tests": [{"input": "1"}]}, "field 'tests.0.output' is missing"),
        ("/run_code", {"code": "x", "language": "cobol"}, "language 'cobol' is not known"),
        ("/run_code", {"code": "x", "files": {"a": "%%"}}, "not base64"),
        ("/run_code", {"code": "x", "memory_limit_MB": 10**6}, "at most 16384"),
        ("/run_code", {"code": "x", "memory_limit_MB": [1]}, "must be a whole number"),
        ("/run_code", {"code": "x", "compile_timeout": 1e9}, "'compile_timeout' is 1000000000.0; it must be less"),
        ("/run_code", {"code": "x", "run_timeout": 10**400}, "must be a valid number"),
        ("/run_code", {"code": "x", "stdin": 5}, "field 'stdin' is 5; it must be a valid string"),
        ("/run_code", {"code": "x", "files": [1]}, "field 'files' is [1]; it must be an object"),
        ("/run", {"code": "x", "limits": {"cpu_seconds": 10**400}}, "at most 300 s"),
        ("/run", {"code": "x", "limits": {"wall_seconds": 1e6}}, "1200 s in all"),
        ("/sessions/nobody", {"code": "x", "run_timeout": 1e9}, "field 'run_timeout' is 1000000000.0; it must be"),
        ("/test_program", [1], "must be a JSON object"),
        ("/test_program", {"program": "x", "tests": ["a", 1]}, "field 'tests.1' is 1; it must be a valid string"),
        ("/test_program_stdio", {"program": "x", "tests": [1]}, "field 'tests.0' is 1; it must be an object"),
        (
            "/run_code",
            {"code": "x", "run_timeout": True},
            "field 'run_timeout' is True; it must be a valid number",
        ),
    ],
)
def test_a_bad_request_gets_one_clear_line(path: str, body: Any, message: str, server: str) -> None:
    answer = post(server, path, body)
    assert answer.status_code == 400 and message in answer.json()["error"], answer.text


def test_null_is_a_field_left_out_and_half_a_surrogate_pair_reaches_the_program(server: str) -> None:
    fields = {"language": None, "run_timeout": None, "files": None, "fetch_files": None, "memory_limit_MB": 0}
    body = {"code": "import sys\nprint(len(sys.stdin.buffer.read()))", "stdin": "\ud800", **fields}
    sent = httpx.post(server + "/run_code", content=json.dumps(body), headers=JSON, timeout=None)
    assert sent.status_code == 200 and sent.json()["run_result"]["stdout"] == "3\n", sent.text


def test_pickles_and_other_non_json_are_refused(server: str) -> None:
    for content in (b"\x80\x04K\x01.", b"{", b"[" * 100_000):
        assert httpx.post(server + "/test_program", content=content, headers=JSON, timeout=None).status_code == 400


def test_a_request_over_the_size_limit_is_refused(server: str) -> None:
    assert post(server, "/test_program", {"program": "x" * (2 << 20), "tests": []}).status_code == 413
    chunks = (b"x" * 65536 for _ in range(40))
    assert httpx.post(server + "/test_program", content=chunks, headers=JSON, timeout=None).status_code == 413


def test_a_web_page_cannot_use_the_keyless_server(server: str) -> None:
    body = {"code": "print(1)"}
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        sent = httpx.post(server + "/run_code", content=json.dumps(body), headers={"Content-Type": kind}, timeout=None)
        assert sent.status_code == 415, sent.text
    port = server.rpartition(":")[2]
    for host in (f"evil.example:{port}", "127.0.0.1.evil.example", "10.0.0.1", "[::2]:1"):
        assert post(server, "/run_code", body, headers={"Host": host}).status_code == 403
        assert get(server + "/health", headers={"Host": host}).status_code == 403
    for host in (f"localhost:{port}", "127.0.0.2", f"[::1]:{port}"):
        assert post(server, "/run_code", body, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "line", ['{"file":["x","a"]}', '{"file":[["x"],3]}', '{"e":[[]]}', '{"e":{"0":1}}', "[1]", "\xff"]
)
def test_what_a_program_writes_on_the_result_channel_is_at_worst_its_own_failure(line: str, server: str) -> None:
    forged = f"import os\nos.write(4, {line.encode()!r} + b'\\n')\nprint(input())"

    async def scenario(spec: str) -> None:
        async with connect(spec) as runner:
            passed, failed = await runner.test_stdio(forged, [StdioTest("1", "1"), StdioTest("1", "2")])
            assert (passed.value, failed.value) == (1, 0), (passed, failed)
            result = await runner.run(forged, stdin="1", fetch=["y"])
            assert result.outcome is Outcome.PASSED and result.files == {}

    for spec in ("local:slots=1", server):
        asyncio.run(scenario(spec))


def test_requests_whose_client_has_gone_are_dropped_from_queue_and_slot(server: str) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=server, timeout=None, limits=httpx.Limits(max_connections=64)) as client:
            # If they continued, the queue ahead of the last request would hold it up longer than any limit.
            body = {"code": "import time; time.sleep(290)", "limits": {"cpu_seconds": 290}}
            gone = [asyncio.create_task(client.post("/run", json=body)) for _ in range(10)]
            gone.append(asyncio.create_task(client.post("/run_code", json=body)))
            while (load := (await client.get("/health")).json())["running"] < 4 or load["waiting"] < 7:
                await asyncio.sleep(0.02)
            for one in gone:
                one.cancel()
            await asyncio.gather(*gone, return_exceptions=True)
            answer = await client.post("/run", json={"code": "print(1)"})
            assert answer.json()["stdout"] == "1\n"
            while (load := (await client.get("/health")).json())["running"] or load["waiting"]:
                await asyncio.sleep(0.02)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("code", "status", "answer"),
    [("raise", 500, "internal error: ZeroDivisionError"), ("fault", 503, "sandbox_fault"), ("fine", 200, "Success")],
)
def test_a_bug_and_a_sandbox_fault_each_have_a_status_and_one_line(code: str, status: int, answer: str) -> None:
    class Faulty:
        """A sandbox whose runs fail as their code says."""

        limits = Limits()

        async def start(self) -> None: ...

        async def aclose(self) -> None: ...

        async def run(self, code: str, *_: Any, **__: Any) -> RunResult:
            if code == "raise":
                raise ZeroDivisionError
            return RunResult(Outcome.SANDBOX_FAULT if code == "fault" else Outcome.PASSED, 0)

    with TestClient(build_app(Faulty()), base_url="http://127.0.0.1") as client:  # type: ignore[arg-type]
        response = client.post("/run_code", json={"code": code})
    assert response.status_code == status and answer in response.text, response.text


def test_health_answers_while_programs_loop_and_a_full_queue_is_429(server: str) -> None:
    async def scenario() -> tuple[int, list[httpx.Response]]:
        async with httpx.AsyncClient(base_url=server, timeout=None, limits=httpx.Limits(max_connections=64)) as client:
            body = {"code": "while True: pass", "run_timeout": 0.5}
            loops = [asyncio.create_task(client.post("/run_code", json=body)) for _ in range(24)]
            while (await client.get("/health")).json()["running"] < 4:
                await asyncio.sleep(0.01)
            for _ in range(10):
                assert (await client.get("/health")).status_code == 200
            running = sum(not loop.done() for loop in loops)
            return running, await asyncio.gather(*loops)

    running, answers = asyncio.run(scenario())
    assert running > 0, "health was answered only when the programs had ended"
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused and all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
    assert sum(answer.status_code == 200 for answer in answers) >= 12


def test_metrics_count_outcomes(server: str) -> None:
    post(server, "/test_program", {"program": ADD, "tests": ["assert add(1, 1) == 3"]})
    text = get(server + "/metrics").text
    assert 'upshot_sandbox_tests_total{outcome="wrong"}' in text and "upshot_sandbox_slots 4" in text


def test_a_key_is_required_if_one_is_set() -> None:
    process, url = start_server(environment={"UPSHOT_SANDBOX_KEY": "sesame"})
    try:
        body = {"program": ADD, "tests": ["assert add(1, 1) == 2"]}
        assert post(url, "/test_program", body).status_code == 401
        assert post(url, "/test_program", body, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert post(url, "/test_program", body, headers={"Authorization": "Bearer sesame"}).json()["results"] == [1]
        assert post(url, "/test_program", body, headers={"X-API-Key": "sesame"}).json()["results"] == [1]

        async def client() -> Outcome:
            async with connect(url, api_key="sesame") as runner:
                return (await runner.test_program(ADD, ["assert add(1, 1) == 2"]))[0].outcome

        assert asyncio.run(client()) is Outcome.PASSED
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def test_a_running_program_is_finished_before_the_server_stops() -> None:
    process, url = start_server()
    answers: list[httpx.Response] = []
    body = {"code": "import time; time.sleep(1.5); print(5)"}
    thread = threading.Thread(target=lambda: answers.append(post(url, "/run_code", body)))
    thread.start()
    assert soon(lambda: get(url + "/health").json()["running"] == 1)
    process.send_signal(signal.SIGTERM)
    thread.join()
    process.wait()
    assert answers[0].json()["run_result"]["stdout"] == "5\n"


def test_without_a_key_only_loopback_is_served() -> None:
    with pytest.raises(UserError, match="not loopback"):
        serve(Sandbox(slots=1), "0.0.0.0", 1, None)


def test_the_command_refuses_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, message in (
            (["--require", "moat"], "unknown layer 'moat'"),
            (["--port", port], f"cannot listen on 127.0.0.1:{port}"),
            (["--slots", "0"], "slots is 0"),
            (["--api-key-file", "/no/such/file"], "No such file"),
        ):
            command = [sys.executable, "-c", START, "sandbox", "--port", str(free_port()), *options]
            done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
            assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr


SPECS = ["local:slots=2", "{server}", "fusion+{server}", "opencode+{server}", "subprocess"]


@pytest.mark.parametrize("spec", SPECS)
def test_runners_are_interchangeable(spec: str, server: str) -> None:
    async def scenario() -> None:
        async with connect(spec.format(server=server)) as runner:
            tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]
            assert [r.value for r in await runner.test_program(ADD, tests, Limits(cpu_seconds=5))] == [1, 0]
            mixed = ["assert add(1, 2) == 3", "assert abs(add(1, 2) - 4) < 1e-6"]
            confirmed = None if isinstance(runner, ScriptRunner) else 1  # a runner without a judge confirms nothing
            assert [r.value for r in await runner.test_program(ADD, mixed, Limits(cpu_seconds=5))] == [confirmed, 0]
            whole = ["assert abs(add(1, 2) - 3) < 1e-6"]
            assert [r.value for r in await runner.test_program(ADD, whole, Limits(cpu_seconds=5))] == [confirmed]
            stdio = [StdioTest("1", "2"), StdioTest("1", "3")]
            assert [
                r.value for r in await runner.test_stdio("print(int(input()) + 1)", stdio, Limits(cpu_seconds=5))
            ] == [1, 0]
            equal = "class E:\n    def __eq__(self, o):\n        return True\ndef add(a, b):\n    return E()"
            assert [r.value for r in await runner.test_program(equal, tests[:1], Limits(cpu_seconds=5))] == [None]
            loop = await runner.test_program(
                "def add(a, b):\n    while True: pass", tests, Limits(cpu_seconds=0.5, wall_seconds=2)
            )
            assert [r.value for r in loop] == [0, 0]
            if not spec.startswith("opencode"):
                result = await runner.run("print(input())\nopen('o', 'w').write('z')", stdin="hey", fetch=["o"])
                assert result.stdout == "hey\n" and result.outcome is Outcome.PASSED and result.files == {"o": b"z"}
            else:
                with pytest.raises(UserError, match="only runs tests"):
                    await runner.run("print(1)")

    asyncio.run(scenario())


def test_an_unknown_session_is_reported_as_ended(server: str) -> None:
    answer = post(server, "/sessions/nobody", {"code": "1"}).json()
    assert answer["outcome"] == "error" and "has ended" in answer["detail"]


@pytest.mark.parametrize("spec", ["local:slots=1", "{server}"])
def test_sessions_locally_and_over_http(spec: str, server: str) -> None:
    async def scenario() -> None:
        async with connect(spec.format(server=server)) as runner, await runner.session() as session:
            await session.turn("x = 20")
            assert (await session.turn("x + 1")).stdout == "21\n"
            both = await asyncio.gather(session.turn("x += 1\nx"), session.turn("x += 1\nx"))
            assert sorted(result.stdout for result in both) == ["21\n", "22\n"]

    asyncio.run(scenario())


def test_a_runner_without_sessions_says_where_to_find_them() -> None:
    async def scenario() -> None:
        async with connect("subprocess") as runner:
            with pytest.raises(UserError, match="has no sessions"):
                await runner.session()

    asyncio.run(scenario())


@pytest.mark.parametrize("spec", ["locl", "ftp://x", "docker+http://x", "local:slots=x", "local:color=red"])
def test_an_unknown_spec_is_named(spec: str) -> None:
    with pytest.raises(UserError, match="unknown"):
        connect(spec)


class Broken(BaseHTTPRequestHandler):
    """A server that fails as its path says."""

    def do_POST(self) -> None:
        body = b'{"results": [1]}' if "short" in self.server.mood else b"oops"  # type: ignore[attr-defined]
        self.send_response(200 if "short" in self.server.mood else 500)  # type: ignore[attr-defined]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("mood", ["broken", "short"])
def test_a_failing_server_makes_scores_missing_instead_of_zero(mood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from upshot.sandbox.http import clients

    monkeypatch.setattr(clients, "RETRY", clients.RetryPolicy(retries=1, backoff_s=0.01))
    backend = ThreadingHTTPServer(("127.0.0.1", 0), Broken)
    backend.mood = mood  # type: ignore[attr-defined]
    threading.Thread(target=backend.serve_forever, daemon=True).start()

    async def scenario(prefix: str) -> list[Any]:
        async with connect(f"{prefix}http://127.0.0.1:{backend.server_port}") as runner:
            return await runner.test_program(ADD, ["assert add(1, 1) == 2", "assert add(1, 1) == 3"])

    for prefix in ("", "opencode+", "fusion+"):
        results = asyncio.run(scenario(prefix))
        assert [r.value for r in results] == [None, None] and all(r.detail for r in results)
    backend.shutdown()
    backend.server_close()
