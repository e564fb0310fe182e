"""The run folder: any value can be written, checkpoints are complete, only one process at a time writes to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from upshot.core.errors import UserError
from upshot.core.files import dump_json_line, to_json_value
from upshot.run.folder import RunFolder, find, free_place


class Stranger:
    """An object whose `repr` fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def new_folder(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.checkpoints.path.mkdir(parents=True)
    return folder


def save(folder: RunFolder, phase: str, step: int, content: str = "", keep: int = 5) -> None:
    def write(to: Path) -> None:
        (to / "weights").write_text(content)

    folder.checkpoints.save(phase, step, keep, write)


def test_a_run_folder_is_written_without_torch() -> None:
    rooms = (
        *("run.folder", "run.checkpoints", "run.lock", "run.resume", "run.trackers", "run.writer"),
        "run.export",
        *("config.phases", "training.metrics.best", "training.metrics.alarms"),
    )
    program = (
        "import sys\n" + "".join(f"import upshot.{room}\n" for room in rooms) + "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = []
    for _ in range(5):
        places.append(free_place("quickstart"))
        places[-1].mkdir(parents=True)
    assert len(set(places)) == 5 and all(place.parent == Path("runs") for place in places)


def test_values_that_json_lacks_are_written_nevertheless(tmp_path: Path) -> None:
    circle: list[Any] = []
    circle.append(circle)
    row = {
        "number": np.float32(0.5),
        "count": np.int64(3),
        "array": np.array([1, 2]),
        "nothing": {"nan": float("nan"), "deep": [np.float64("inf")]},
        "half": "red \ud83d",
        "many": {3},
        "stranger": Stranger(),
        "bytes": b"x",
        "circle": circle,
        "huge": 10**5000,
        ("a", 1): "key",
    }
    folder = new_folder(tmp_path)
    folder.append_metrics("rl", 1, row)
    folder.append_rollouts([{"step": 1, **row}])
    folder.write_status("stopped", reason="red \ud83d")
    (found,) = folder.lines("rl", 1)
    assert found["number"] == 0.5 and found["count"] == 3 and found["array"] == [1, 2] and found["many"] == [3]
    assert found["nothing"] == {"nan": None, "deep": [None]}
    assert found["half"] == "red \ud83d", "the very text, in JSON's own escape"
    assert found["stranger"] == "<Stranger>" and found["bytes"] == "b'x'" and found["('a', 1)"] == "key"


def test_lines_with_unicode_line_ends_survive_a_rewind(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    folder.append_rollouts([{"step": 1, "text": "one\u2028two\u0085three"}, {"step": 2, "text": "later"}])
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 1, "te')
    folder.rewind(["rl"], "rl", 1)
    lines = (tmp_path / "rollouts.jsonl").read_bytes().split(b"\n")
    assert [json.loads(line)["text"] for line in lines if line] == ["one\u2028two\u0085three"]


def test_plain_values_are_not_changed() -> None:
    value = {"a": [1, 2.5, "x", None, True], "b": {"c": "d"}}
    assert to_json_value(value) == value and json.loads(dump_json_line(value)) == value


def test_the_newest_checkpoint_is_by_phase_and_step_and_not_by_the_clock(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    for age, (phase, step) in enumerate([("rl", 20), ("rl", 10), ("warm-start", 100)]):
        save(folder, phase, step)
        state = folder.checkpoints.path / f"{phase}-{step:06d}" / "state.json"
        os.utime(state, (age, age))
    assert [(found.phase, found.step) for found in folder.checkpoints.saved()] == [
        ("warm-start", 100),
        ("rl", 10),
        ("rl", 20),
    ]
    save(folder, "rl", 30, keep=2)
    assert [found.step for found in folder.checkpoints.saved()] == [20, 30], "the oldest steps go"


def test_a_complete_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    save(folder, "rl", 2, "good")
    save(folder, "rl", 2, "torn")
    assert (folder.checkpoints.path / "rl-000002" / "weights").read_text() == "good"


def test_an_error_while_saving_leaves_only_the_earlier_checkpoint(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    save(folder, "rl", 2, "good")
    (folder.checkpoints.path / ".partial-rl-000003").mkdir()  # from a save that was killed

    def fail(to: Path) -> None:
        (to / "weights").write_text("half")
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        folder.checkpoints.save("rl", 4, 1, fail)
    assert [path.name for path in folder.checkpoints.path.iterdir()] == ["rl-000002"]


HOLD = """
import os, sys, time
from pathlib import Path
from upshot.run.folder import RunFolder
with RunFolder(Path(sys.argv[1])).lock(print):
    child = os.fork()
    print(child or "", flush=True) if child else None
    time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_dead_even_if_its_children_live(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(UserError, match=f"process {holder.pid} on "), folder.lock(print):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with folder.lock(print):
            pass
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_a_second_run_of_the_same_process_is_refused_and_the_first_keeps_its_lock(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    with folder.lock(print):
        for _ in range(2):
            with pytest.raises(UserError, match="another run in this process"), RunFolder(tmp_path).lock(print):
                pass
    with folder.lock(print):
        pass


def test_a_table_is_read_again_when_its_file_has_grown_and_not_before(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    assert folder.metrics == [] and folder.replies == []
    folder.append_metrics("rl", 1, {"x": 1})
    first = folder.metrics
    assert [line["x"] for line in first] == [1] and folder.metrics is first
    folder.append_metrics("rl", 2, {"x": 2})
    assert [line["x"] for line in folder.metrics] == [1, 2]
    folder.rewind(["rl"], "rl", 1)
    assert [line["x"] for line in folder.metrics] == [1]


def test_runs_below_a_folder_are_listed_oldest_first(tmp_path: Path) -> None:
    for name, started in (("late", 30.0), ("deep/er/and/deeper", 10.0), ("by-others", "1970-01-01T00:00:20+00:00")):
        (tmp_path / name / "checkpoints" / "rl-000001").mkdir(parents=True)
        (tmp_path / name / "recipe.yaml").write_text("name: x\n")
        (tmp_path / name / "checkpoints" / "rl-000001" / "recipe.yaml").write_text("name: no run\n")
        (tmp_path / name / "status.json").write_text(json.dumps({"state": "finished", "started": started}))
    (tmp_path / "only-lines").mkdir()
    (tmp_path / "only-lines" / "metrics.jsonl").write_text('{"step": 1}\n')
    found = [run.path.relative_to(tmp_path).as_posix() for run in find(tmp_path)]
    assert found == ["deep/er/and/deeper", "by-others", "late"]
    assert find(tmp_path / "nothing") == []
