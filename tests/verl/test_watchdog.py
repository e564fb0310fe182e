"""A run that makes no progress says what it waits for, and is ended only if a limit is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from upshot.core.errors import UserError
from upshot.verl.checks.watchdog import MARK, Patience, Watchdog, describe_demands


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(folder: Path, patience: Patience) -> tuple[Watchdog, Clock, list[str]]:
    said: list[str] = []
    clock = Clock()
    (folder / "log").write_text("loading\n")

    def say(line: str) -> None:
        said.append(line)
        with (folder / "log").open("a") as file:  # as the command does with all output of verl's program
            file.write(line + "\n")

    dog = Watchdog(folder / "log", folder / "steps", lambda: ["Ray has 0 of 2 CPU free"], say, patience, clock)
    return dog, clock, said


def test_silence_is_reported_repeatedly_with_the_last_line_and_what_is_awaited(tmp_path: Path) -> None:
    dog, clock, said = made(tmp_path, Patience(silent_s=60))
    clock.now = 59
    dog.look()
    assert said == []
    clock.now = 61
    dog.look()
    assert said == [f"{MARK}no new line for 61 s; the last one: loading", f"{MARK}Ray has 0 of 2 CPU free"]
    clock.now = 100
    dog.look()
    assert len(said) == 2
    clock.now = 122
    dog.look()
    assert said[2].startswith(f"{MARK}no new line for 122 s")


def test_a_new_line_counts_as_progress_and_lines_without_steps_are_reported_later(tmp_path: Path) -> None:
    dog, clock, said = made(tmp_path, Patience(silent_s=60))
    for number in range(1, 14):
        clock.now = number * 50
        (tmp_path / "log").write_text(f"line {number}\n")
        dog.look()
    assert [line for line in said if "no new line" in line] == []
    assert said[0].startswith(f"{MARK}no step for 600 s")


def test_a_step_counts_as_progress(tmp_path: Path) -> None:
    dog, clock, _ = made(tmp_path, Patience(silent_s=1000, end_after_s=100))
    for number in range(1, 5):
        clock.now = number * 90
        (tmp_path / "steps").write_text("x" * number)
        dog.look()


def test_a_run_ends_by_itself_only_where_a_limit_is_set(tmp_path: Path) -> None:
    dog, clock, said = made(tmp_path, Patience(silent_s=60, end_after_s=100))
    clock.now = 99
    dog.look()
    clock.now = 101
    with pytest.raises(UserError, match=r"no step for 101 s, and upshot.watch.end_after_s is 100"):
        dog.look()
    assert f"{MARK}Ray has 0 of 2 CPU free" in said
    forever, clock, _ = made(tmp_path, Patience(silent_s=60))
    clock.now = 1e6
    forever.look()


def test_the_limits_are_a_section_of_the_config_and_unknown_keys_are_refused() -> None:
    assert Patience.of({}) == Patience()
    assert Patience.of({"upshot": {"watch": {"silent_s": 5}}}) == Patience(silent_s=5)
    with pytest.raises(UserError, match="has no key 'silence'; known: end_after_s, grace_s, silent_s"):
        Patience.of({"upshot": {"watch": {"silence": 5}}})


def test_what_ray_cannot_place_is_reported_with_its_resources() -> None:
    bundle = {"CPU": 3.0, "GPU": 1.0}
    groups = [
        {"name": "global_pool", "state": "PENDING", "bundles": {0: bundle, 1: bundle}},
        {"name": "placed", "state": "CREATED", "bundles": {0: bundle}},
    ]
    assert describe_demands(groups, [({"CPU": 1.0}, 3)]) == [
        "Ray cannot place the group 'global_pool': 6 CPU, 2 GPU together on one node",
        "Ray cannot place 3 task(s) or actor(s) that need 1 CPU",
    ]


def test_a_watchdog_without_information_ends_no_run(tmp_path: Path) -> None:
    dog, clock, said = made(tmp_path, Patience(silent_s=60))

    def gone() -> list[str]:
        raise ConnectionError("Ray does not answer")

    dog.waits_for = gone
    clock.now = 61
    dog.look()
    assert "is unknown" in said[1] and "Ray does not answer" in said[1]
