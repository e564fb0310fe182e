"""`upshot export RUN`: a folder that transformers loads, in the weights' own type, with a card that says how it was
made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.training.workshop import recipe
from upshot.cli import main
from upshot.core.errors import UserError
from upshot.models.local import load_whole, local_path
from upshot.run import export
from upshot.run.folder import RunFolder
from upshot.run.run import train
from upshot.training.metrics.best import BestMark

TINY = {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained all weights, in bfloat16."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    more = {"model": {**TINY, "dtype": "bfloat16"}, "eval": {"every": 2, "rows": 2}}
    train(recipe(folder, warm=False, steps=3, save={"every": 1, "keep": 3}, more=more))
    return folder


@pytest.fixture(scope="module")
def adapted(whole: Path) -> Path:
    """A run that trained adapters on the other run's model."""
    folder = whole.parent / "adapted"
    base = export.export(RunFolder.open(whole), out=whole.parent / "base")
    more = {"model": {"path": str(base), "lora": {"r": 2, "alpha": 64}}, "eval": {"every": 2, "rows": 2}}
    lottery = {"reward": {"metrics": [{"name": "tests.training.helpers:Lottery"}]}}
    train(recipe(folder, warm=False, steps=2, lr=1e-2, more=more | lottery))
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["export", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_an_export_loads_anywhere_in_its_own_type_without_files_of_the_run(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, str(whole), "--checkpoint", "2", "--out", str(tmp_path / "out"))
    assert code == 0 and out.strip() == str(tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert not names & {"learner.pt", "state.json", "counters.json"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    expected = AutoModelForCausalLM.from_pretrained(whole / "checkpoints" / "rl-000002", dtype="auto")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    AutoTokenizer.from_pretrained(tmp_path / "out")


def test_the_card_lists_recipe_results_and_data_and_no_local_path(whole: Path, tmp_path: Path) -> None:
    card = (export.export(RunFolder.open(whole), "last", out=tmp_path / "out") / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers") and "`rl`, 3 steps, seed 0" in card
    for words in (
        "| reward/mean |",
        "| eval/reward/mean |",
        "task: `slots`",
        "prompts_per_step: 3",
        "split `validation`",
    ):
        assert words in card, words
    assert str(tmp_path) not in card and str(whole.parent) not in card and "run_dir" not in card


def test_an_adapter_is_exported_as_it_is_or_merged_with_the_same_outputs(
    adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = export.export(RunFolder.open(adapted), out=tmp_path / "plain")
    assert (plain / "adapter_model.safetensors").is_file() and not (plain / "model.safetensors").exists()
    assert "library_name: peft" in (plain / "README.md").read_text()
    assert str(adapted.parent) not in (plain / "README.md").read_text()
    assert run(capsys, str(adapted), "--merge", "--out", str(tmp_path / "merged"))[0] == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.bfloat16 and not list((tmp_path / "merged").glob("adapter*"))
    ids = torch.arange(8, 20)[None]
    expected = load_whole(str(plain), "float32", "cpu")[0](ids).logits
    assert torch.allclose(merged.float()(ids).logits, expected, atol=2e-2, rtol=2e-2)


def test_the_best_checkpoint_is_exported_where_one_was_kept_and_a_wrong_one_is_refused_by_name(whole: Path) -> None:
    folder = RunFolder.open(whole)
    assert export.find_checkpoint(folder) == export.find_checkpoint(folder, "best")
    folder.checkpoints.save("rl", 2, 3, lambda to: None, BestMark("eval/reward/mean", 1.0))
    assert [export.find_checkpoint(folder, name).step for name in ("", "best", "last", "1")] == [2, 2, 3, 1]
    with pytest.raises(export.UserError, match="no checkpoint '7'; there are rl-000001"):
        export.find_checkpoint(folder, "7")
    (folder.checkpoints.path / "best.json").unlink()
    with pytest.raises(export.UserError, match=r"set train\.save\.best"):
        export.find_checkpoint(folder, "best")


def test_an_existing_folder_is_not_overwritten(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    code, _, err = run(capsys, str(whole), "--out", str(tmp_path))
    assert code == 2 and "choose another place with --out" in err and (tmp_path / "mine.txt").read_text() == "precious"


def test_a_push_needs_a_token_and_uploads_the_folder(
    whole: Path, adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    code, _, err = run(capsys, str(whole), "--out", str(tmp_path / "one"), "--push", "me/model")
    assert code == 2 and "hf auth login" in err and str(tmp_path / "one") in err
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    code, _, err = run(capsys, str(adapted), "--out", str(tmp_path / "local"), "--push", "me/model")
    assert code == 2 and "--merge" in err, "an adapter whose base nobody else has is no model"
    sent: list[Any] = []

    def upload(out: Path, name: str) -> str:
        sent.append((name, sorted(file.name for file in out.iterdir())))
        return f"https://huggingface.co/{name}"

    monkeypatch.setattr(export, "upload", upload)
    code, out, _ = run(capsys, str(whole), "--out", str(tmp_path / "two"), "--push", "me/model")
    assert code == 0 and "huggingface.co/me/model" in out
    assert sent[0][0] == "me/model" and {"README.md", "model.safetensors"} <= set(sent[0][1])

    def refused(out: Path, name: str) -> str:
        raise OSError("no route to the hub\nand more")

    monkeypatch.setattr(export, "upload", refused)
    code, _, err = run(capsys, str(whole), "--out", str(tmp_path / "three"), "--push", "me/model")
    assert code == 2 and "cannot push to 'me/model': no route to the hub" in err


def test_a_run_folder_as_a_model_means_its_best_or_else_newest_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="has no checkpoint yet"):
        local_path(str(run))
    for phase, step in (("warm-start", 900), ("rl", 20), ("rl", 100)):
        folder = run / "checkpoints" / f"{phase}-{step:06d}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "state.json").write_text(json.dumps({"phase": phase, "step": step}))
    assert local_path(str(run)) == str(run / "checkpoints" / "rl-000100")
    (run / "checkpoints" / "best.json").write_text(json.dumps({"checkpoint": "rl-000020"}))
    assert local_path(str(run)) == str(run / "checkpoints" / "rl-000020")
