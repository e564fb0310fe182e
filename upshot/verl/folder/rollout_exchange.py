"""A step's replies on their way from verl's trainer into the run folder, over storage that both processes see.

The trainer leaves a whole file a step, with what it learned from the replies. The launching process writes it into
`rollouts.jsonl` when verl has logged the step, and takes the file away.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from upshot.core.whole_files import write_whole
from upshot.rollout.rollout import Rollout
from upshot.training.learner.distributed.pickling import dumps, loads

FOLDER = "verl/played"


def note(run: Path, step: int, groups: Sequence[Sequence[Rollout]]) -> None:
    """Leave a step's replies, grouped by prompt, those without a reward too."""
    path = _file(run, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, dumps([list(group) for group in groups]))


def read(run: Path, step: int) -> list[list[Rollout]]:
    """The replies of a step; none where none were left."""
    path = _file(run, step)
    groups: list[list[Rollout]] = loads(path.read_bytes()) if path.is_file() else []
    return groups


def steps(run: Path) -> list[int]:
    """The steps of which there is something to read."""
    return sorted(int(path.stem) for path in (run / FOLDER).glob("*.replies"))


def drop(run: Path, step: int) -> None:
    """Take away what was read of a step."""
    _file(run, step).unlink(missing_ok=True)


def _file(run: Path, step: int) -> Path:
    return run / FOLDER / f"{step:06d}.replies"
