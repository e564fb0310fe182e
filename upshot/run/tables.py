"""A run as tables: lists of flat mappings, as `pandas.DataFrame(run.metrics)` takes them.

    run = upshot.runs.read("runs/quickstart-…")
    run.metrics[-1]["reward/mean"]            # a line a step
    [r for r in run.replies if r["reward"] is None]
    run.futures[0]["verifier"]

Reads the files only; nothing of a run is loaded. What a score lacks is None, and the reason stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe
from upshot.core import jsonl
from upshot.core.errors import UserError

Table = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """A run folder, read."""

    path: Path

    @cached_property
    def recipe(self) -> Recipe:
        """What was run."""
        return load_recipe(str(self.path / "recipe.yaml")).recipe

    @property
    def status(self) -> dict[str, Any]:
        """How it stands: {'state': 'running' | 'finished' | 'stopped', 'seconds': …}; empty before it began."""
        file = self.path / "status.json"
        return (jsonl.parse(file.read_bytes()) if file.is_file() else None) or {}

    @cached_property
    def metrics(self) -> Table:
        """A line a step: phase, step, and every logged number."""
        return jsonl.read(self.path / "metrics.jsonl")

    @cached_property
    def rollouts(self) -> Table:
        """A reply each, as it was written: messages, futures, reward, credit."""
        return jsonl.read(self.path / "rollouts.jsonl")

    @cached_property
    def replies(self) -> Table:
        """A line a reply: step, row, group, its words, its reward and each metric's mean."""
        return [_reply(line) for line in self.rollouts]

    @cached_property
    def futures(self) -> Table:
        """A line a future: whose reply it continues, its last words, its score by each metric."""
        return [future for line in self.rollouts for future in _futures(line)]

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint, a Hugging Face folder; None before the first."""
        from upshot.run.checkpoints import Checkpoints

        saved = Checkpoints(self.path).saved()
        return saved[-1].path if saved else None


def read(path: str | Path) -> Run:
    """The run in a folder."""
    folder = Path(path)
    if not (folder / "recipe.yaml").is_file():
        raise UserError(f"'{path}' is no run folder: it has no recipe.yaml")
    return Run(folder)


def find(folder: str | Path = "runs") -> list[Run]:
    """The runs below a folder, oldest first."""
    found = [path.parent for path in Path(folder).glob("**/recipe.yaml")]
    return [Run(path) for path in sorted(found, key=lambda path: (path / "recipe.yaml").stat().st_mtime)]


def _reply(line: Mapping[str, Any]) -> dict[str, Any]:
    reward = line.get("reward") or {}
    means = {name: score.get("value") for name, score in (reward.get("means") or {}).items()}
    total = reward.get("total") or {}
    told = {key: line.get(key) for key in ("step", "row", "source", "group", "key", "ended")}
    return {
        **told,
        "reply": _last(line.get("messages") or (), "assistant"),
        "reward": total.get("value"),
        "missing": total.get("missing"),
        **means,
        **{f"group/{name}": value for name, value in (line.get("groups") or {}).items()},
    }


def _futures(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for future in line.get("futures") or ():
        scores = {name: score.get("value") for name, score in (future.get("scores") or {}).items()}
        told = {"step": line.get("step"), "row": line.get("row"), "reply": line.get("key")}
        said = future.get("messages") or ()
        last = said[-1]["content"] if said else None
        more = {key: future.get(key) for key in ("key", "by", "ended", "missing")}
        yield {**told, **more, "turns": len(said), "last": last, **scores}


def _last(messages: Any, role: str) -> str | None:
    return next((message.get("content") for message in reversed(messages) if message.get("role") == role), None)
