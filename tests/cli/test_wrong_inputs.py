"""Every typing mistake gets one clear line with the way out, before anything slow has begun."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from upshot.cli import main


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints on stderr; it must exit with status 2."""
    try:
        code = main(words)
    except SystemExit as stop:  # from argparse itself
        code = int(stop.code or 0)
    assert code == 2
    return capsys.readouterr().err


def test_overrides_may_follow_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", "--dry-run", "train.steps=7"]) == 0
    assert "7 steps" in capsys.readouterr().out
    assert "unknown key 'stepz'" in said(capsys, "train", "quickstart", "--dry-run", "train.stepz=7")
    assert "unrecognized arguments: --nope" in said(capsys, "train", "quickstart", "--dry-run", "--nope")


@pytest.mark.parametrize(
    ("words", "usage"), [("sandbox run x", "usage: upshot sandbox "), ("-x sandbox", "usage: upshot ")]
)
def test_arguments_that_a_verb_does_not_take_show_its_usage(
    words: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = said(capsys, *words.split())
    assert message.startswith(usage) and "unrecognized arguments" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("futures.user=llm", "played by the model 'user', but the recipe defines no models; add models.user: …"),
        ("models.judge=http://127.0.0.1:1/v1#x", "cannot reach http://127.0.0.1:1/v1"),
        ("model.device=tpu", "cannot use the device 'tpu'"),
        ("model.device=gpu", "cannot use the device 'gpu'; use auto, cpu, cuda or cuda:1"),
        ("eval=null", "'eval' is a section with the keys every, split,"),
        ("model.path=/nope", "there is no folder '/nope'"),
    ],
)
def test_a_run_that_cannot_work_stops_before_its_warm_start(
    override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert message in said(capsys, "train", "quickstart", override, f"run_dir={run}")
    assert not (run / "metrics.jsonl").is_file()


def test_data_files_are_checked_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no file 'data/math-hard/rl_train.parquet'" in said(capsys, "train", "collabllm-grpo")


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_missing_file_is_reported_before_pytorch_is_imported(dry: list[str]) -> None:
    code = f"import sys; from upshot.cli import main; code = main(['train', 'grpo', 'task.file=/nope.jsonl', *{dry}]); "
    code += "assert code == 2 and not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "no file '/nope.jsonl'" in done.stderr, done.stderr


def test_a_dry_run_checks_that_the_model_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no folder '/nope'" in said(capsys, "train", "quickstart", "--dry-run", "model.path=/nope")


@pytest.mark.parametrize("verb", [("serve", "smollm2-135m"), ("sandbox",), ("verify", "--serve")])
def test_a_taken_or_invalid_port_is_refused(verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{number}" in said(capsys, *verb, "--port", str(number))
    assert "'99999' is not a port" in said(capsys, *verb, "--port", "99999")


def test_view_refuses_a_port_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'99999' is not a port" in said(capsys, "view", "--port", "99999")


def test_a_wrong_file_or_run_suggests_the_nearest_and_does_not_list_every_recipe(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart-1").mkdir(parents=True)
    (tmp_path / "kiosk.yaml").touch()
    assert "no such file; did you mean 'kiosk.yaml'?" in said(capsys, "train", "kisok.yaml")
    assert "run folder (it has no recipe.yaml); did you mean 'runs/quickstart-1'?" in said(
        capsys, "eval", "runs/quikstart-1"
    )
    far = said(capsys, "train", "nothing-like-it.yaml")
    assert "`upshot recipe list` names those that ship" in far and "quickstart" not in far


def test_a_mistyped_model_is_not_mistaken_for_a_provider(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("litellm")
    monkeypatch.chdir(tmp_path)
    err = said(capsys, "eval", "quickstart", "--models", "trained=runs/nosuch", "--rows", "2", "--out", "out")
    assert "model 'runs/nosuch': there is no such folder here, and litellm has no provider 'runs'" in err


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "quickstart", "--rows", "0"],
        ["eval", "quickstart", "--rows", "-1"],
        ["score", "rows.jsonl", "--limit", "0"],
        ["verify", "rows.jsonl", "--limit", "0"],
        ["data", "build", "--task", "math-hard", "--out", "out", "--conversations", "0"],
        ["logs", "prepare", "logs.jsonl", "--out", "out", "--replies", "0"],
    ],
)
def test_a_number_of_rows_below_one_is_refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert f"'{words[-1]}' is not a whole number of at least 1" in capsys.readouterr().err


def test_a_dry_run_shows_the_tokens_that_fit_the_context_and_the_epochs_of_whole_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ["task.rows_per_split=10", "train.prompts_per_step=4", "train.group_size=2", "futures.rounds=0"]
    assert main(["train", "quickstart", "--dry-run", *sizes, "train.epochs=1", "episode.max_tokens=100000"]) == 0
    told = capsys.readouterr().out
    assert "3 steps (1.2 epochs)" in told
    assert f"at most {24 * 256 / 1000:.3g} k" in told, "24 replies within 256 positions"


def test_a_mistyped_run_folder_suggests_the_nearest_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "recipe.yaml").write_text("")
    nearest = "; did you mean 'runs/quickstart'?"
    assert f"model 'runs/quikstart': there is no such folder{nearest}" in said(capsys, "chat", "runs/quikstart")
    assert f"there is no folder 'runs/quikstart'{nearest}" in said(
        capsys, "train", "quickstart", "model.path=runs/quikstart"
    )
    for verb in (["train", "--resume"], ["export"], ["runs", "rm"]):
        assert nearest in said(capsys, *verb, "runs/quikstart")


def test_a_folder_without_a_recipe_is_not_suggested_to_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    error = said(capsys, "train", "notes")
    assert (
        "'notes' is neither a recipe nor a run folder (it has no recipe.yaml)" in error and "did you mean" not in error
    )


def test_the_hub_is_asked_once_for_a_model_that_nobody_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def cannot_connect(self: object, name: str, timeout: float) -> None:
        asked.append(name)
        raise ConnectionError("name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", cannot_connect)
    monkeypatch.setattr("huggingface_hub.utils._http._http_backoff_base", lambda *_, **__: asked.append("with retries"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    err = said(capsys, "serve", "nosuchmodel", "--port", "0")
    assert "model 'nosuchmodel': no such folder, and the hub cannot be reached (ConnectionError" in err
    assert asked == ["nosuchmodel"]


@pytest.mark.parametrize("verb", [("serve", "smollm2-135m"), ("sandbox",), ("verify", "--serve")])
def test_beyond_loopback_no_server_starts_without_a_key(
    verb: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("UPSHOT_API_KEY", "UPSHOT_SANDBOX_KEY", "UPSHOT_SCORER_KEY"):
        monkeypatch.delenv(variable, raising=False)
    assert "--host 0.0.0.0 is not loopback" in said(capsys, *verb, "--host", "0.0.0.0", "--port", "0")


def test_a_mistyped_model_name_does_not_query_the_hub(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'smollm2-135m'?" in said(capsys, "serve", "smollm2-135mm", "--port", "0")


def test_an_output_that_cannot_be_written_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = tmp_path / "answers.jsonl"
    rows.write_text('{"response": "#### 4", "ground_truth": "4"}\n')
    assert "'/proc/x': no such file" in said(capsys, "verify", str(rows), "--task", "gsm8k", "--out", "/proc/x")
