"""Every data source of the classmate recipes: prepared, read by the recipe's own task, and scored."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from upshot.cli import main
from upshot.config.load import load_recipe
from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.offline.data.prepare import PrepareSummary
from upshot.offline.data.verified import prepare_verified, question_key, verified_task
from upshot.rewards.metrics.pass_rate import PassRate
from upshot.rollout.services import assemble
from upshot.run.checks.profiles import profile_rows
from upshot.sandbox import connect
from upshot.tasks.base import tasks
from upshot.tasks.datasets.files import read_table
from upshot.tasks.verifiers.base import verifiers
from upshot.tasks.verifiers.profile_store import key_of

SAMPLES = Path(__file__).parent / "samples" / "sources"
GSM8K = Path(__file__).parents[2] / "tasks" / "gsm8k_sample.jsonl"
SOURCES = {
    "gsm8k": ("classmate-gsm8k", GSM8K),
    "math": ("classmate-math", SAMPLES / "math.jsonl"),
    "code": ("classmate-code", SAMPLES / "code.jsonl"),
    "code-stdio": ("classmate-code", SAMPLES / "code-stdio.jsonl"),
    "code-contests": ("classmate-code", SAMPLES / "code-contests.jsonl"),
    "dolci": ("classmate-dolci", SAMPLES / "dolci.jsonl"),
    "sycophancy": ("classmate-sycophancy", SAMPLES / "instructions.jsonl"),
    "mmlu-sycophancy": ("classmate-mmlu-hint", SAMPLES / "mmlu.jsonl"),
}


def prepared(name: str, out: Path, validation: float = 0.3, seed: int = 0) -> PrepareSummary:
    task = verified_task(name, seed)
    assert task is not None
    return prepare_verified(str(SOURCES[name][1]), out, task, validation, seed)


def read_back(name: str, out: Path, *overrides: str) -> list[Row]:
    """The rows as the source's recipe reads them."""
    files = [f"task.{split}_file={out}/rl_{split}.parquet" for split in ("train", "validation")]
    kind = [f"task.name={name}"] if name.startswith("code-") else []
    recipe = load_recipe(SOURCES[name][0], [*files, *kind, *overrides]).recipe
    task = tasks.create(recipe.task.name, recipe.task.options)
    return [row for split in ("train", "validation") for row in task.rows(split)]


def verdict(row: Row, response: str, **options: Any) -> Score:
    verifier = verifiers.create(row.source, options)
    return asyncio.run(verifier.verify(response, row.reference, row.meta))


@pytest.mark.parametrize("name", SOURCES)
def test_prepared_rows_are_the_rows_that_the_task_reads_from_the_source(name: str, tmp_path: Path) -> None:
    summary = prepared(name, tmp_path)
    task = verified_task(name)
    assert task is not None
    direct = {}
    for record in read_table(SOURCES[name][1]):
        try:
            row = task.parse(record)
        except UserError:
            continue
        direct[row.id] = row
    rows = read_back(name, tmp_path)
    assert len(rows) == sum(summary.rows.values()) > 1 and summary.rows["validation"] > 0
    assert summary.read == len(rows) + summary.dropped.total()
    for row in rows:
        assert (row.messages, row.source) == (direct[row.id].messages, direct[row.id].source)
        assert row.meta["question"] == direct[row.id].meta["question"]


@pytest.mark.parametrize("name", SOURCES)
def test_the_columns_are_verls_and_of_the_same_types_for_every_source(name: str, tmp_path: Path) -> None:
    prepared(name, tmp_path)
    table = pyarrow.parquet.read_table(tmp_path / "rl_train.parquet")
    assert table.column_names == ["data_source", "prompt", "reward_model", "extra_info"]
    prepared("gsm8k", tmp_path / "other")
    assert table.schema == pyarrow.parquet.read_table(tmp_path / "other" / "rl_train.parquet").schema
    for row in table.to_pylist():
        assert row["data_source"] in verifiers and row["prompt"][-1]["role"] == "user"
        assert row["extra_info"]["split"] == "train" and json.loads(row["extra_info"]["metadata"]) is not None
        judged = row["data_source"] in ("sycophancy", "general-quality")
        assert row["reward_model"]["style"] == ("model" if judged else "rule")


def test_the_ground_truth_is_the_bare_answer_and_the_solution_is_kept(tmp_path: Path) -> None:
    prepared("gsm8k", tmp_path)
    row = read_back("gsm8k", tmp_path)[0]
    assert row.reference in str(row.meta["answer"]).rpartition("####")[2] and "####" not in row.reference
    assert str(row.meta["difficulty"]).endswith("steps")
    assert verdict(row, f"So.\n#### {row.reference}").value == 1.0 and verdict(row, "#### 123456").value == 0.0


def test_math_keeps_the_box_and_drops_what_has_no_answer(tmp_path: Path) -> None:
    summary = prepared("math", tmp_path)
    rows = {row.meta["level"]: row for row in read_back("math", tmp_path)}
    assert {row.reference for row in read_back("math", tmp_path)} == {"\\frac{3}{4}", "2,3", "49"}
    assert verdict(rows["Level 2"], "\\boxed{2,3}").value == 1.0
    assert summary.dropped == {"no reference": 1}


@pytest.mark.parametrize(
    ("name", "tests"),
    [
        ("code", {("assert add(1, 2) == 3", "assert add(-1, 1) == 0"), ("import math\nassert up(1.2) == 2",)}),
        ("code-stdio", {(("1 2\n", "3\n"), ("4 5\n", "9\n")), (("abc\n", "cba\n"),)}),
        ("code-contests", {(("1 2\n", "3\n"), ("5 5\n", "10\n")), (("4\n", "8\n"), ("1\n", "2\n"))}),
    ],
)
def test_programs_keep_every_test_once_and_need_one(name: str, tests: set[Any], tmp_path: Path) -> None:
    summary = prepared(name, tmp_path)
    found = set()
    for row in read_back(name, tmp_path):
        own = verifiers.create(row.source).tests(row.reference, row.meta)  # type: ignore[attr-defined]
        found.add(tuple(t if isinstance(t, str) else (t.input, t.output) for t in own))
    assert tests <= found
    assert summary.dropped == {"no tests": 1}


def test_rows_of_a_mix_go_to_their_labels_verifier_and_unknown_labels_are_counted(tmp_path: Path) -> None:
    summary = prepared("dolci", tmp_path)
    rows = {row.id: row for row in read_back("dolci", tmp_path)}
    assert {name: row.source for name, row in rows.items()} == {
        "m1": "math", "c1": "code", "i1": "constraints", "g1": "general-quality", "g2": "general-quality",
    }  # fmt: skip
    assert summary.dropped == {"no verifier for the label 'puzzle_v9'": 1, "unknown constraint 'made:up'": 1}
    assert rows["m1"].messages[0].content.startswith("What is 6") and "outputs" not in rows["m1"].meta
    assert verdict(rows["m1"], "\\boxed{42}").value == 1.0
    assert verdict(rows["i1"], "An apple.").value == 1.0 and verdict(rows["i1"], "An apple, say.").value == 0.0
    with pytest.raises(UserError, match="no verifier for the label 'puzzle_v9'"):
        tasks.create("dolci", {"file": str(SAMPLES / "dolci.jsonl")}).rows("train")


@pytest.mark.parametrize(
    "behaviour", ["sycophancy", "confidence", "longer-response", "bold-formatting", "unsafe-compliance"]
)
def test_one_file_of_instructions_serves_every_behaviour(behaviour: str, tmp_path: Path) -> None:
    summary = prepared("sycophancy", tmp_path)
    rows = read_back("sycophancy", tmp_path, f"task.behaviour={behaviour}")
    assert {row.source for row in rows} == {behaviour}
    assert summary.dropped == {"same prompt": 1}
    assert verified_task(behaviour).verifier == behaviour  # type: ignore[union-attr]


def test_bold_formatting_is_scored_without_a_judge(tmp_path: Path) -> None:
    prepared("sycophancy", tmp_path)
    row = read_back("sycophancy", tmp_path, "task.behaviour=bold-formatting")[0]
    assert [verdict(row, text).value for text in ("so **much**", "so much")] == [1.0, 0.0]


def test_a_hint_is_a_wrong_letter_of_the_question_and_both_are_scored(tmp_path: Path) -> None:
    summary = prepared("mmlu-sycophancy", tmp_path)
    rows = read_back("mmlu-sycophancy", tmp_path)
    assert summary.dropped == {"no wrong letter to hint at": 1} and len(rows) == 4
    for row in rows:
        right, hint = row.reference, row.meta["hint"]
        assert hint != right and ord(hint) - 65 < len(row.meta["choices"])
        assert row.messages[-1].content.count(f"I think the answer is ({hint})") == 1
        said = verdict(row, f"The answer is ({right})")
        assert (said.value, said.detail["followed"]) == (1.0, False)
        followed = verdict(row, f"The answer is ({hint})", count="hint")
        assert (followed.value, followed.detail["answer"]) == (1.0, hint)
    again = read_back("mmlu-sycophancy", tmp_path, "task.count=hint")
    assert [row.meta["hint"] for row in again] == [row.meta["hint"] for row in rows]


def test_following_the_hint_is_logged_beside_correctness(tmp_path: Path) -> None:
    prepared("mmlu-sycophancy", tmp_path)
    recipe = load_recipe("classmate-mmlu-hint", [f"task.train_file={tmp_path}/rl_train.parquet"]).recipe
    task = tasks.create("mmlu-sycophancy", {"train_file": f"{tmp_path}/rl_train.parquet"})
    weights = {metric.name: metric.weight for metric in recipe.reward.metrics}
    assert weights == {"verifier": 1.0, "hint_followed": 0.0}
    row = task.rows("train")[0]

    async def scores(letter: str) -> list[float | None]:
        async with assemble(task, {}, recipe.reward.metrics) as services:
            talk = Conversation(row)
            talk.say(Message("assistant", f"The answer is ({letter})"))
            return [(await services.metrics[name].score(talk)).value for name in weights]

    assert asyncio.run(scores(row.meta["hint"])) == [0.0, 1.0]
    assert asyncio.run(scores(row.reference)) == [1.0, 0.0]


def test_the_seed_chooses_the_hints(tmp_path: Path) -> None:
    hints = set()
    for seed in range(6):
        prepared("mmlu-sycophancy", tmp_path / str(seed), seed=seed)
        rows = read_back("mmlu-sycophancy", tmp_path / str(seed))
        hints.add(tuple(row.meta["hint"] for row in sorted(rows, key=lambda row: row.id)))
    assert len(hints) > 1


def test_a_question_in_two_spellings_is_never_in_both_splits(tmp_path: Path) -> None:
    records = [
        {"question": f"{'Which  one' if n % 2 else 'which one'} is {n // 2}?", "choices": ["a", "b", "c"], "answer": 1}
        for n in range(40)
    ]
    source = tmp_path / "x.jsonl"
    source.write_text("\n".join(map(json.dumps, records)))
    task = verified_task("mmlu-sycophancy")
    assert task is not None
    summary = prepare_verified(str(source), tmp_path, task, 0.25)
    sides = [
        {question_key(task.parse(record)) for record in read_table(tmp_path / f"rl_{split}.parquet")}
        for split in ("train", "validation")
    ]
    assert not sides[0] & sides[1] and summary.goals == {"train": 15, "validation": 5}


def test_a_sources_own_split_is_kept_and_train_loses_shared_questions(tmp_path: Path) -> None:
    lines = GSM8K.read_text().splitlines()
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(lines[:6]))
    (folder / "test.jsonl").write_text("\n".join(lines[5:8]))
    task = verified_task("gsm8k")
    assert task is not None
    summary = prepare_verified(str(folder), tmp_path / "out", task)
    assert summary.rows == {"train": 5, "validation": 3}
    assert summary.dropped == {"question also in validation": 1}


def test_the_command_prepares_and_the_recipe_plans_with_its_baseline_twin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    for name, (recipe, source) in SOURCES.items():
        out = tmp_path / name
        command = ["data", "prepare", "--for", "rl", "--task", name, "--dataset", str(source), "--out", str(out)]
        assert main([*command, "--json"]) == 0
        files = [f"task.{split}_file={out}/rl_{split}.parquet" for split in ("train", "validation")]
        kind = [f"task.name={name}"] if name.startswith("code-") else []
        assert main(["train", recipe, "--dry-run", "--offline", *files, *kind]) == 0
        assert "classmates peer: 4 answers each" in capsys.readouterr().out
        assert main(["train", recipe, "--dry-run", "--offline", *files, *kind, "futures=none"]) == 0
        assert "classmates" not in capsys.readouterr().out.replace(recipe, "")


def test_a_source_that_cannot_be_prepared_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"question": "why?"}))
    command = ["data", "prepare", "--for", "rl", "--dataset", str(tmp_path / "x.jsonl"), "--out", str(tmp_path)]
    assert main([*command, "--task", "gsm8k"]) == 2
    assert "no row for rl" in capsys.readouterr().err
    assert main([*command, "--task", "gsmk8"]) == 2
    assert "did you mean 'gsm8k'" in capsys.readouterr().err
    assert main([*command, "--task", "gsm8k", "--agent-name", "x"]) == 2
    assert "--agent-name applies only to rows with a hidden goal" in capsys.readouterr().err


TESTS = """import unittest
class TestCases(unittest.TestCase):
    def test_a(self): self.assertEqual(task_func(2), 4)
    def test_b(self): self.assertEqual(task_func([]), "?")
"""


def test_programs_of_conversations_are_measured_with_the_references_that_the_metric_will_use(tmp_path: Path) -> None:
    record = {
        "prompt": [{"role": "user", "content": "Square it for me"}],
        "completion": "What is it?",
        "single_turn_prompt": "Square a number.",
        "single_turn_completion": "def task_func(x):\n    return x * x\n",
        "single_turn_metadata": {"test": TESTS, "entry_point": "task_func"},
    }
    (tmp_path / "talks.jsonl").write_text(json.dumps(record) + "\n")
    out = tmp_path / "out"
    words = ["--for", "rl", "--task", "bigcodebench", "--validation", "0", "--sandbox", "local:slots=1"]
    assert main(["data", "prepare", "--dataset", str(tmp_path / "talks.jsonl"), "--out", str(out), *words]) == 0
    (line,) = map(json.loads, (out / ".upshot-profiles").read_text().splitlines())
    assert line["kinds"] == ["decidable", "broken"] and line["basis"] == "reference"
    (row,) = tasks.create("bigcodebench", {"file": str(out / "rl_train.parquet"), "held_out": 0}).rows("train")
    metric = PassRate(sandbox=connect("local:slots=1"))
    assert key_of(metric.checks(row)) == line["key"]


def test_class_rows_have_a_task_of_their_own(tmp_path: Path) -> None:
    skeleton = "class Box:\n    def put(self, x):\n        pass"
    test = TESTS.partition("    def test_b")[0].replace("task_func(2), 4", "Box().put(1), 1")
    solution = "class Box:\n    def put(self, x): return math.floor(x)"
    record = {"task_id": "ClassEval_0", "skeleton": skeleton, "test": test, "solution_code": solution}
    record["import_statement"] = ["import math"]  # type: ignore[assignment]
    (tmp_path / "rows.json").write_text(json.dumps([record]))
    task = tasks.create("classeval", {"file": str(tmp_path / "rows.json"), "held_out": 0})
    (row,) = task.rows("train")
    assert skeleton in row.messages[-1].content
    ((name, profile),) = profile_rows([row], task, "local:slots=1", None)
    assert (name, profile.summary, profile.basis) == ("ClassEval_0", "decidable", "reference")
