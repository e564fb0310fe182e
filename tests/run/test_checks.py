"""Everything wrong with a run is reported before it begins: within seconds, and nothing is written."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_parts
from tests.training.workshop import recipe
from upshot.cli import main
from upshot.config.recipe import Recipe
from upshot.core.conversation import Message, Row
from upshot.core.errors import UserError
from upshot.rollout.prompt_length import PromptLengthFilter, filter_rows, find_long
from upshot.run.checks import find
from upshot.run.run import train

DEAD = "http://127.0.0.1:1/v1#x"


def wrong(recipe: Recipe, offline: bool = False) -> list[str]:
    """What a check reports."""
    return [finding.says for finding in find(recipe, offline) if finding.fatal]


class Endpoint(BaseHTTPRequestHandler):
    """Lists one model, answers every request, and records what was asked."""

    asked: list[dict[str, Any]] = []  # noqa: RUF012 - one server a test
    status = 200

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "listed", "owned_by": "test"}]})

    def do_POST(self) -> None:
        type(self).asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        choice = {"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
        self.reply({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}, type(self).status)

    def reply(self, data: Any, status: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    Endpoint.asked, Endpoint.status = [], 200
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_run_with_nothing_wrong_has_no_findings(tmp_path: Path) -> None:
    assert find(recipe(tmp_path / "run")) == []
    assert list(tmp_path.iterdir()) == []


def test_all_mistakes_are_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    keyed = {"url": "http://127.0.0.1:1/v1", "model": "y", "api_key_env": "NO_SUCH_KEY"}
    models = {"user": DEAD, "judge": keyed}
    found = wrong(recipe(tmp_path, more={"models": models, "trackers": ["wanbd"], "model": {"path": "/nope"}}))
    assert [next((word for word in words if word in says), says) for says, words in zip(
        found,
        [["unknown tracker 'wanbd'"], ["there is no folder '/nope'"], ["cannot reach http://127.0.0.1:1/v1"],
         ["needs the environment variable NO_SUCH_KEY"]],
        strict=True,
    )] == [
        "unknown tracker 'wanbd'", "there is no folder '/nope'", "cannot reach http://127.0.0.1:1/v1",
        "needs the environment variable NO_SUCH_KEY",
    ]  # fmt: skip


def test_an_endpoint_is_asked_for_a_few_tokens_and_offline_for_none(tmp_path: Path, endpoint: str) -> None:
    settings = recipe(tmp_path / "run", more={"models": {"user": f"{endpoint}#listed"}})
    assert wrong(settings, offline=True) == [] and Endpoint.asked == []
    assert wrong(settings) == []
    assert [body["max_tokens"] for body in Endpoint.asked] == [16]
    Endpoint.status = 404
    assert "does not know the model 'listed'" in wrong(settings)[0]


def test_a_model_name_that_the_endpoint_does_not_list_is_reported(
    tmp_path: Path, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert wrong(recipe(tmp_path / "run", more={"models": {"user": f"{endpoint}#lsted"}})) == []
    assert f"{endpoint} does not list the model 'lsted'; did you mean 'listed'?" in caplog.text


def test_offline_a_missing_key_is_still_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    keyed = {"url": "http://127.0.0.1:1/v1", "model": "y", "api_key_env": "NO_SUCH_KEY"}
    assert "NO_SUCH_KEY" in wrong(recipe(tmp_path / "run", more={"models": {"judge": keyed}}), offline=True)[0]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"reward": {"metrics": [{"name": "accuracy"}]}}, "needs a judge; set models.judge"),
        ({"reward": {"metrics": [{"name": "verifier"}], "manager": {"name": "remote", "url": "http://127.0.0.1:1"}}},
         "reward.manager.url: cannot reach http://127.0.0.1:1"),
        ({"sandbox": "http://127.0.0.1:1"}, "sandbox: cannot reach http://127.0.0.1:1"),
        ({"task": {"name": "gsm8k", "train_file": "absent.jsonl"}}, "absent.jsonl"),
        ({"task": {"name": "gsm8k", "train_file": "tests/tasks/gsm8k_sample.jsonl"}, "warm_start": None},
         "needs a model that knows the language"),
        ({"train": {"method": "sft", "data": "absent.parquet"}}, "there is no file 'absent.parquet'"),
        ({"train": {"method": "dpo"}}, "needs train.data"),
        ({"model": {"device": "tpu"}}, "cannot use the device 'tpu'"),
        ({"episode": {"temperature": 0}}, "episode.temperature is 0: all replies to a row would be the same"),
        ({"episode": {"top_k": 1}}, "episode.top_k is 1: all replies to a row would be the same"),
        ({"train": {"method": "ppo"}, "episode": {"temperature": 0}}, "set it above 0"),
        ({"train": {"method": "online-dpo"}, "episode": {"top_k": 1}}, "set it to 2 or more, or to 0"),
        ({"credit": {"tokens": "thought"}}, "credit.tokens is thought, and the model has no token for '</think>'"),
        ({"train": {"data": "absent.jsonl"}}, "train.data: there is no file 'absent.jsonl'"),
        ({"eval": {"data": "absent.jsonl"}}, "eval.data: there is no file 'absent.jsonl'"),
        ({"model": {"chat_template": "/no/such.jinja"}}, "model.chat_template '/no/such.jinja': no such file"),
    ],
)  # fmt: skip
def test_each_kind_of_mistake_is_a_finding(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert any(says in found for found in wrong(recipe(tmp_path / "run", more=more)))


def test_a_method_that_samples_nothing_may_be_greedy_and_thoughts_of_known_markers_are_trained(tmp_path: Path) -> None:
    greedy = {"train": {"method": "sft", "steps": 1}, "episode": {"temperature": 0}}
    assert wrong(recipe(tmp_path / "run", more=greedy)) == []
    thoughtful = {"task": {"name": "ciphers", "limit": 8}, "credit": {"tokens": "thought"}, "futures": {"rounds": 0}}
    assert wrong(recipe(tmp_path / "run", more=thoughtful)) == []


def test_a_data_file_without_its_columns_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "hi", "chosen": "a"}\n')
    settings = recipe(tmp_path / "run", more={"train": {"method": "dpo", "data": str(tmp_path / "pairs.jsonl")}})
    assert "row 1 has no 'rejected'; it has prompt, chosen" in wrong(settings)[0]


def test_a_model_folder_without_weights_or_tokenizer_is_reported(tmp_path: Path) -> None:
    module, _, _, _ = tiny_parts(0)
    module.config.save_pretrained(tmp_path / "bare")
    settings = recipe(tmp_path / "run", more={"model": {"path": str(tmp_path / "bare")}})
    found = wrong(settings)
    assert "has no weights" in found[0] and "has no tokenizer" in found[1]


def test_prompts_that_do_not_fit_are_counted_and_the_choice_is_named(tmp_path: Path) -> None:
    tiny = {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32, "context": 8}
    (says,) = wrong(recipe(tmp_path / "run", more={"model": {"tiny": tiny}}))
    assert "of 64 prompts leave no room" in says and "episode.long_prompts=filter" in says
    filtered = recipe(tmp_path / "run", more={"model": {"tiny": tiny}, "episode": {"long_prompts": "filter"}})
    (note,) = find(filtered)
    assert not note.fatal and "do not fit and are left out" in note.says


def test_long_prompts_are_refused_skipped_or_cut() -> None:
    _, _, renderer, _ = tiny_parts(0)
    word = renderer.decode([20])
    rows = [Row(str(n), (Message("system", word), Message("user", " ".join([word] * n)))) for n in (2, 30, 3)]
    lengths = PromptLengthFilter(renderer, 16, 4)
    assert find_long(rows, lengths) == ["1"] or find_long(rows, lengths) == ["30"]
    with pytest.raises(UserError, match="1 of 3 prompts"):
        filter_rows(rows, lengths, "error")
    assert [row.id for row in filter_rows(rows, lengths, "filter")] == ["2", "3"]
    cut = filter_rows(rows, lengths, "truncate")
    assert [row.id for row in cut] == ["2", "30", "3"] and all(map(lengths.fits, cut))
    assert len(renderer.prompt_ids(cut[1].messages)) == 12, "room for a whole reply"
    assert cut[1].messages[0].content == word


def test_a_run_trains_on_the_rows_that_fit(tmp_path: Path) -> None:
    tiny = {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32, "context": 12}
    more = {"model": {"tiny": tiny}, "episode": {"max_tokens": 3, "long_prompts": "filter"}, "futures": {"rounds": 0}}
    folder = train(recipe(tmp_path / "run", steps=1, warm=False, more=more))
    (line,) = [json.loads(text) for text in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert "missing/too_long" not in line and line["reward/missing"] == 0


def test_a_dry_run_prints_each_finding_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "quickstart", "--dry-run", f"models.judge={DEAD}", "model.path=/nope", f"run_dir={tmp_path}/run"]
    assert main(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2 and all(line.startswith("upshot: ") for line in lines)
    assert main([*words, "--offline"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_refused_by_the_same_checks_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 things to fix: there is no folder '/nope'; cannot reach"):
        train(recipe(tmp_path / "run", more={"models": {"judge": DEAD}, "model": {"path": "/nope"}}))
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_hub_is_reported_at_once_and_not_queried_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError("no route")

    monkeypatch.setattr("upshot.run.checks.context.socket.create_connection", refuse)
    settings = recipe(tmp_path / "run", warm=False, more={"model": {"path": "no-such-owner/no-such-model"}})
    (says,) = wrong(settings)
    assert "is not a folder here, and huggingface.co cannot be reached (no route)" in says
    (note,) = find(settings, offline=True)
    assert not note.fatal and "was not looked up (--offline)" in note.says


def mapped(folder: Path, address: str, tokenizer: str) -> Recipe:
    """A recipe whose classmate is served elsewhere, as a map says."""
    port = int(address.rsplit(":", 1)[1].removesuffix("/v1"))
    entry = {"port": port, "local_host": "127.0.0.1", "served_model_name": "listed", "tokenizer": tokenizer}
    (folder / "map.json").write_text(json.dumps({"Qwen/Qwen3-0.6B": entry}))
    futures = {"name": "classmates", "classmates": str(folder / "map.json")}
    return recipe(folder / "run", more={"task": {"name": "ciphers", "limit": 40}, "futures": futures})


def test_a_mapped_classmate_without_an_available_tokenizer_is_reported_before_the_run(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    [found] = wrong(mapped(tmp_path, endpoint, ""))
    assert "the tokenizer of classmate 'Qwen/Qwen3-0.6B' 'Qwen/Qwen3-0.6B' is not a folder here" in found
    assert "tokenizer: FOLDER" in found
    tiny_parts()[1].save_pretrained(tmp_path / "tokenizer")
    assert wrong(mapped(tmp_path, endpoint, str(tmp_path / "tokenizer"))) == []


def test_four_bits_without_their_library_are_reported_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if "bitsand" in name else found(name))
    module, tokenizer, _, _ = tiny_parts()
    module.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    given = recipe(tmp_path / "run", more={"model": {"path": str(tmp_path / "model"), "lora": {}, "quantize": "4bit"}})
    assert any("needs bitsandbytes: pip install" in says for says in wrong(given))
