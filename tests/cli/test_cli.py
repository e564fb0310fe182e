"""The command line as a user meets it: fast help, one line for every mistake, exit codes."""

from __future__ import annotations

import bdb
import contextlib
import io
import json
import pdb
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from upshot.cli import VERBS, main, module_of
from upshot.run.console import RichReporter

TINY = [
    "quickstart", "model.tiny.hidden=16", "model.tiny.layers=1", "model.tiny.heads=2", "model.tiny.mlp=16",
    "warm_start.steps=2", "warm_start.batch=4", "train.steps=2", "train.prompts_per_step=2", "train.group_size=2",
    "task.rows_per_split=32", "train.save.every=1",
]  # fmt: skip


def test_help_imports_nothing_heavy() -> None:
    """`upshot --help` takes 0.3 s, most of it imports, so none of the slow packages may be imported."""
    code = "import sys; from upshot.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += (
        "print([m for m in ('torch','transformers','numpy','pydantic','fastapi','aiohttp','rich') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    assert all(verb in out for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    _, _, description = (module_of(verb).__doc__ or "").partition("\n\n")
    assert f"upshot {verb}" in out and "".join(description.split()) in "".join(out.split())


def test_the_rooms_without_torch_import_no_torch() -> None:
    code = textwrap.dedent("""
        import importlib, pkgutil, sys
        rooms = "core config rewards rollout tasks"
        for room in rooms.split():
            module = importlib.import_module("upshot." + room)
            for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
                importlib.import_module(found.name)
        print("torch" in sys.modules, "transformers" in sys.modules)
    """)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.split() == ["False", "False"], out.stderr


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["train", "quickstart", "trian.lr=1"], "unknown key 'trian'; did you mean 'train'?"),
        (["train", "quickstart", "train.lr=fast"], "train.lr = 'fast': input should be a valid number"),
        (
            ["train", "quickstart", "reward.metrics.0.name=verifer"],
            "unknown metric 'verifer' in reward.metrics; did you mean",
        ),
        (["train", "quickstart", "task.name=slotz"], "unknown task 'slotz' in task; did you mean 'slots'?"),
        (
            ["train", "quickstart", "task.vage=1"],
            "unknown option 'vage' of task 'slots' in task; did you mean 'vague'?",
        ),
        (["train", "absent.yaml"], "recipe 'absent.yaml': no such file"),
        (["train"], "name a recipe"),
        (["train", "--resume", "/nowhere"], "'/nowhere' is not a run folder"),
        (["train", "quickstart", "run_dir=/proc/nothing/here"], "cannot write run folder '/proc/nothing/here'"),
        (["train", "quickstart", "model.path=./absent-model"], "there is no folder './absent-model'"),
        (["view", "/nowhere"], "/nowhere"),
        (["recipe", "show", "quickstrat"], "unknown recipe 'quickstrat'; did you mean 'quickstart'?"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    args: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    error = capsys.readouterr().err
    assert line in error
    assert len(error.strip().splitlines()) == 1


def test_dry_run_prints_the_plan_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", "--dry-run"]) == 0
    assert "16 prompts x 8 replies" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_recipe_show_prints_values_with_their_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "show", "quickstart", "train.lr=0.5"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("train.lr "))
    assert line.split() == ["train.lr", "0.5", "command", "line"]


def test_train_writes_the_run_folder_and_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", *TINY, f"run_dir={run}", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["phase"], line["step"]) for line in lines] == [
        ("warm-start", 1), ("warm-start", 2), ("rl", 1), ("rl", 2),
    ]  # fmt: skip
    for name in ("recipe.yaml", "versions.json", "metrics.jsonl", "rollouts.jsonl", "status.json", "report.html"):
        assert (run / name).is_file(), name
    reply = json.loads((run / "rollouts.jsonl").read_text().splitlines()[0])
    assert {"messages", "futures", "reward", "credit", "groups"} <= reply.keys()
    assert main(["train", *TINY, f"run_dir={run}"]) == 2  # it already holds a run


def test_breakpoint_in_a_metric_drops_into_pdb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stopping.py").write_text(
        textwrap.dedent("""
            from upshot.rewards.metric import Metric
            from upshot.core.score import Score

            class Stop(Metric):
                async def score(self, conversation):
                    breakpoint()
                    return Score(1.0)
        """)
    )
    # What Python does at a breakpoint; pytest installs its own hook in its place.
    monkeypatch.setattr(sys, "breakpointhook", lambda: pdb.Pdb().set_trace(sys._getframe(1)))
    monkeypatch.setattr(sys, "stdin", io.StringIO("p 6 * 7\nq\n"))
    monkeypatch.syspath_prepend(tmp_path)
    words = [*TINY, "warm_start=null", "train.steps=1", "reward.metrics.0.name=stopping:Stop"]
    with contextlib.suppress(bdb.BdbQuit):
        main(["train", *words, f"run_dir={tmp_path}/run"])
    assert "(Pdb) 42" in capsys.readouterr().out


def test_text_that_looks_like_markup_is_printed_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    text = "unexpected [/INST] in the reply"
    reporter = RichReporter()
    try:
        reporter.phase("rl", 2)
        reporter.step("rl", 1, {f"by/word={text}/reward": 1.0, f"metric/{text}": 2.0})
        reporter.say(text)
    finally:
        reporter.close()
    assert text in capsys.readouterr().out
    assert main(["recipe", "show", "quickstart", "model.chat_template=x [/INST]"]) == 0
    assert "[/INST]" in capsys.readouterr().out


def test_a_stopped_run_still_writes_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from upshot.training.loops import rl

    learned: list[int] = []

    def stop(*args: object) -> dict[str, float]:
        learned.append(1)
        if len(learned) == 2:
            raise KeyboardInterrupt  # like Ctrl-C
        return {}

    monkeypatch.setattr(rl, "learn", stop)
    run = tmp_path / "run"
    words = [word for word in TINY if not word.startswith("warm_start")]
    assert main(["train", *words, "warm_start=null", f"run_dir={run}", "--quiet"]) == 130
    assert (run / "report.html").is_file()
    assert f"resume with  upshot train --resume {run}" in capsys.readouterr().err
