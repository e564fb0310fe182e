"""`upshot verify`: scores files of every task, counts missing scores, writes each row, refuses wrong input."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.patience import wait_until
from upshot.cli import make_parser
from upshot.core.errors import UserError


def run(*arguments: str) -> int:
    args = make_parser(["verify"]).parse_args(["verify", *arguments])
    return int(args.run(args))


def rows_file(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


GSM8K = [
    {"response": "#### 42", "ground_truth": "so\n#### 42", "id": 1},
    {"response": "it is 42", "ground_truth": "42", "id": 2},
    {"response": "#### 41", "ground_truth": 42, "id": 3},
    {"response": "#### 41", "ground_truth": "many", "id": 4},
]


def test_rows_are_scored_and_written_with_their_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rows_file(tmp_path / "in.jsonl", GSM8K)
    assert run(file, "--task", "gsm8k", "--json", "--out", str(tmp_path / "out.jsonl")) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["rows"], summary["scored"]) == (4, 3)
    assert summary["accuracy"] == pytest.approx(1 / 3)
    assert summary["missing"] == {"bad_row": 1}
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["score"] for row in written] == [1.0, 0.0, 0.0, None]
    assert [row["id"] for row in written] == [1, 2, 3, 4]
    assert written[3]["missing"] == "bad_row"


def test_modes_options_and_managers_are_applied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rows_file(tmp_path / "in.jsonl", GSM8K)
    run(file, "--task", "gsm8k", "--mode", "flexible")
    assert "accuracy 0.6667 over 3 of 4 rows" in capsys.readouterr().out
    run(file, "--task", "openai/gsm8k", "--option", "mode=flexible", "--manager", "pool", "--workers", "1")
    out = capsys.readouterr().out
    assert "accuracy 0.6667" in out
    assert "missing 1 x bad_row: gsm8k: reference is not a number" in out


def test_mixed_rows_are_routed_by_their_data_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"data_source": "openai/gsm8k", "response": "#### 1", "reward_model": {"ground_truth": "1"}},
        {"data_source": "multiple-choice", "response": "(B)", "ground_truth": "A"},
    ]
    run(rows_file(tmp_path / "in.jsonl", rows), "--json")
    summary = json.loads(capsys.readouterr().out)
    assert summary["by_task"]["openai/gsm8k"]["accuracy"] == 1
    assert summary["by_task"]["multiple-choice"]["accuracy"] == 0


def test_an_unknown_source_costs_only_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"data_source": "openai/gsm8k", "response": "#### 1", "ground_truth": "1"},
        {"data_source": "puzzle_v9", "response": "(B)", "ground_truth": "A"},
    ]
    file = rows_file(tmp_path / "in.jsonl", rows)
    assert run(file, "--out", str(tmp_path / "out.jsonl")) == 0
    assert "missing 1 x bad_row: unknown verifier 'puzzle_v9'" in capsys.readouterr().out
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["score"] for row in written] == [1.0, None]


def test_a_file_with_only_unknown_sources_is_refused(tmp_path: Path) -> None:
    rows = [{"data_source": "gsm8", "response": "#### 1", "ground_truth": "1"}]
    with pytest.raises(UserError, match="did you mean 'gsm8k'"):
        run(rows_file(tmp_path / "in.jsonl", rows))


def test_a_lone_surrogate_anywhere_stops_nothing(tmp_path: Path) -> None:
    rows = [
        {"data_source": "gsm8k", "response": "\ud800 #### 5", "ground_truth": "5", "\udfff": 1},
        {"data_source": "constraints", "response": "a \ud800", "ground_truth": {"func_name": "made_\ud800"}},
        {"data_source": "exact-match", "response": "\ud800", "ground_truth": "\ud800"},
        {"data_source": "so\ud800", "response": "x", "ground_truth": "x"},
    ]
    file, out = rows_file(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "upshot.cli", "verify", file, "--out", str(out)]  # a terminal of its own: UTF-8
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line)["score"] for line in out.read_text().splitlines()] == [1.0, None, 1.0, None]


class Silent(BaseHTTPRequestHandler):
    """An endpoint that lists its model, accepts a call and never answers."""

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "judge"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.connection.recv(1 << 20)
        self.connection.recv(1)  # until the caller hangs up

    def log_message(self, *_: object) -> None: ...


def test_a_hanging_judge_is_cut_off_at_the_time_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = rows_file(tmp_path / "in.jsonl", [{"prompt": "why?", "response": "so"}])
        judge = f"http://127.0.0.1:{server.server_address[1]}/v1"
        assert run(file, "--task", "sycophancy", "--judge", judge, "--seconds", "0.5", "--json") == 1
        server.shutdown()
    assert json.loads(capsys.readouterr().out)["missing"] == {"timeout": 1}


@pytest.mark.parametrize(
    ("task", "right", "truth", "more"),
    [
        ("math", "\\boxed{\\frac{1}{2}}", "0.5", {}),
        ("constraints", "no comma", {"instruction_id": ["punctuation:no_comma"], "kwargs": [{}]}, {}),
        ("multiple-choice", "The answer is (A).", 0, {"choices": ["x", "y"]}),
        ("mmlu-sycophancy", "The answer is (A).", "A", {"choices": ["x", "y"], "hint": "B"}),
        ("exact-match", "<answer>ada</answer>", "Ada", {}),
        ("search-qa", "<answer>ada</answer>", ["Ada"], {}),
    ],
)
def test_every_task_scores_its_rows(
    task: str, right: str, truth: Any, more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"response": text, "ground_truth": truth, **more} for text in (right, "something, else")]
    run(rows_file(tmp_path / "in.jsonl", rows), "--task", task, "--json")
    assert json.loads(capsys.readouterr().out)["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "gsm"], "did you mean 'gsm8k'"),
        (["--task", "gsm8k", "--mode", "lax"], "'strict' or 'flexible'"),
        (["--task", "gsm8k", "--option", "mode"], "KEY=VALUE"),
        (["--task", "sycophancy"], "--judge"),
        (["--task", "slots"], "no verifier"),
        ([], "--task NAME"),
        (["--task", "gsm8k", "--manager", "remote"], "--url"),
    ],
)
def test_mistakes_are_reported_before_any_work(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        run(rows_file(tmp_path / "in.jsonl", GSM8K), *arguments)


def test_files_without_rows_or_responses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        run(str(tmp_path / "none.jsonl"), "--task", "gsm8k")
    with pytest.raises(UserError, match="has no rows"):
        run(rows_file(tmp_path / "empty.jsonl", []), "--task", "gsm8k")
    with pytest.raises(UserError, match="row 1 has no 'response'"):
        run(rows_file(tmp_path / "x.jsonl", [{"answer": "1"}]), "--task", "gsm8k")


def test_the_scorer_serves_the_remote_manager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; from upshot.offline.verify import VerifySettings, serve; "
        "serve(VerifySettings(), '127.0.0.1', int(sys.argv[1]))"
    )
    port = _free_port()
    process = subprocess.Popen([sys.executable, "-c", code, str(port)], stdout=subprocess.DEVNULL)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health")
        file = rows_file(tmp_path / "in.jsonl", GSM8K)
        run(file, "--task", "gsm8k", "--manager", "remote", "--url", f"http://127.0.0.1:{port}", "--json")
        assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(1 / 3)
    finally:
        process.terminate()
        assert process.wait() == 0


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _wait_for(url: str) -> None:
    def answers() -> bool:
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(url).read())
        return False

    wait_until(answers)


def test_an_option_may_be_a_list(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown option 'x'"):
        run(rows_file(tmp_path / "in.jsonl", GSM8K), "--task", "gsm8k", "--option", "x=[1]")


def test_the_answer_form_in_messages_counts_like_that_in_a_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of RLVR sets hold the question under `messages`, with examples that end in 'the answer is'."""
    question = "Q: 40 + 2?\nA: So the answer is 42.\n\nQ: 1 + 1?"
    opening = [{"role": "user", "content": question}]
    asked = {"ground_truth": "2", "dataset": "gsm8k", "response": "So the answer is 2."}
    replied = {"messages": [*opening, {"role": "assistant", "content": "So the answer is 2."}]}
    rows = [{**asked, "prompt": opening}, {**asked, "messages": opening}, {**asked, "response": None, **replied}]
    bare = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "So the answer is 2."}]
    rows.append({**asked, "messages": bare})  # the response itself does not have the required form
    assert run(rows_file(tmp_path / "in.jsonl", rows), "--out", str(tmp_path / "out.jsonl")) == 0
    scores = [json.loads(line)["score"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert scores == [1.0, 1.0, 1.0, 0.0]


def test_a_validation_dump_with_a_null_column_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verl fills a column that a reward function reported only for other rows with null, whatever its name."""
    dumped = {"input": "user\n1 + 1?", "output": "#### 2", "gts": "2", "score": 1.0, "step": 3}
    rows = [{**dumped, "response": None}, {**dumped, "response": "#### 2"}]
    assert run(rows_file(tmp_path / "3.jsonl", rows), "--task", "gsm8k", "--json") == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == 1.0
