"""BigCodeBench through the sandbox: the candidate whose code passes its unit tests is kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet
import pytest

from upshot.cli import make_parser

HERE = Path(__file__).parent


def test_the_candidate_whose_code_passes_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    parser = make_parser(["data"])
    goals = shutil.copy(HERE / "samples" / "bigcodebench.jsonl", tmp_path)  # profiles are stored beside the file
    words = ["data", "build", "--task", "bigcodebench", "--file", goals]
    words += ["--split", "all", "--out", str(tmp_path), "--policy", "scripted:collab_actors:coder", "--user", "script"]
    words += ["--metrics", "{code->pass_rate: {weight: 1, extract: fence}}", "--candidates", "4", "--rounds", "0"]
    args = parser.parse_args([*words, "--max-messages", "2", "--json"])
    assert args.run(args) == 0
    rows = pyarrow.parquet.read_table(tmp_path / "candidates.parquet").to_pylist()
    assert len(rows) == 12
    for row in rows:
        right = int(row["single_turn_metadata"]["task_id"].split("/")[1])
        passes = f"x + {right}\n" in row["completion"]
        assert row["rewards"]["code->pass_rate"] == [1.0 if passes else 0.0] and row["score"] == float(passes)
    assert {row["score"] for row in rows} == {0.0, 1.0}
