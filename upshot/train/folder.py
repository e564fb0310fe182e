"""The run folder: what a run leaves behind, and what it resumes from.

recipe.yaml     the resolved recipe          metrics.jsonl    one line a step
versions.json   what it ran with             rollouts.jsonl   one line a reply, with its tree of futures
status.json     running, finished, stopped   checkpoints/     Hugging Face folders
report.html     written at the end and by `upshot view`
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from upshot import __version__, config
from upshot.errors import UserError
from upshot.recipe import Recipe

PACKAGES = ("torch", "transformers", "numpy", "tokenizers", "pydantic", "peft")


class RunFolder:
    """Reads and writes one run folder. Lines are appended and flushed, so a killed run keeps what it finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"

    @classmethod
    def create(cls, recipe: Recipe) -> RunFolder:
        """A new folder with the recipe and versions in it."""
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        path = Path(recipe.run_dir) if recipe.run_dir else Path("runs") / f"{recipe.name}-{stamp}"
        if (path / "recipe.yaml").exists():
            raise UserError(
                f"run folder '{path}' already holds a run; continue it with --resume {path}, or choose another run_dir"
            )
        folder = cls(path)
        try:
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
            (path / "recipe.yaml").write_text(config.dump(recipe))
            (path / "versions.json").write_text(json.dumps(versions(), indent=2))
        except OSError as error:
            raise UserError(f"cannot write run folder '{path}': {error.strerror}; set run_dir=…") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run folder."""
        if not (path / "recipe.yaml").is_file():
            raise UserError(f"'{path}' is no run folder: it has no recipe.yaml")
        return cls(path)

    def recipe(self) -> Recipe:
        """The resolved recipe of the run."""
        return config.load(str(self.path / "recipe.yaml")).recipe

    def metrics(self, phase: str, step: int, values: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl; numbers that are not finite become null."""
        self._append("metrics.jsonl", {"phase": phase, "step": step, **values})

    def rollouts(self, replies: Iterable[Mapping[str, Any]]) -> None:
        """Append replies to rollouts.jsonl."""
        self._append_lines("rollouts.jsonl", (json.dumps(reply, ensure_ascii=False) for reply in replies))

    def status(self, state: str, **more: Any) -> None:
        """Say how the run stands, since when, and how many seconds it has run in all."""
        path = self.path / "status.json"
        before = (_parse(path.read_text()) if path.is_file() else None) or {}
        now = time.time()
        seconds = before.get("seconds", 0.0)
        if before.get("state") == "running" and state != "running":
            seconds += now - before.get("time", now)
        started = before.get("started", now)
        _write_atomic(path, json.dumps({"state": state, "started": started, "time": now, "seconds": seconds, **more}))

    def save(self, phase: str, step: int, keep: int, write: Callable[[Path], None]) -> Path:
        """A checkpoint that is there entirely or not at all; older ones beyond `keep` go."""
        final = self.checkpoints / f"{phase}-{step:06d}"
        partial = self.checkpoints / f".partial-{phase}-{step:06d}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            write(partial)
            (partial / "state.json").write_text(json.dumps({"phase": phase, "step": step}))
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            if not _is_io(error):
                raise
            raise UserError(
                f"cannot write checkpoint '{final}': {_why(error)}; earlier checkpoints are intact, "
                f"free some space and continue with --resume {self.path}"
            ) from error
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in self._saved()[:-keep]:
            shutil.rmtree(old)
        return final

    def latest(self) -> tuple[Path, str, int] | None:
        """The newest checkpoint with its phase and step."""
        saved = self._saved()
        if not saved:
            return None
        state = json.loads((saved[-1] / "state.json").read_text())
        return saved[-1], state["phase"], state["step"]

    def rewind(self, phases: list[str], phase: str, step: int) -> None:
        """Drop lines that a killed run wrote after its last checkpoint, so that nothing is counted twice."""
        last = (phases.index(phase), step)

        def earlier(line: Mapping[str, Any]) -> bool:
            where = line.get("phase", phases[-1])  # rollouts name no phase: only the last one plays any
            return where in phases and (phases.index(where), line["step"]) <= last

        for name in ("metrics.jsonl", "rollouts.jsonl"):
            path = self.path / name
            if path.is_file():
                lines = [text for text in path.read_text().splitlines() if (row := _parse(text)) and earlier(row)]
                _write_atomic(path, "".join(line + "\n" for line in lines))

    def _saved(self) -> list[Path]:
        found = [path for path in self.checkpoints.glob("*-*") if (path / "state.json").is_file()]
        return sorted(
            (p for p in found if not p.name.startswith(".")), key=lambda p: (p / "state.json").stat().st_mtime_ns
        )

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        clean = {key: _finite(value) for key, value in row.items()}
        self._append_lines(name, [json.dumps(clean, ensure_ascii=False)])

    def _append_lines(self, name: str, lines: Iterable[str]) -> None:
        try:
            with (self.path / name).open("a") as file:
                file.writelines(line + "\n" for line in lines)
        except OSError as error:
            raise UserError(
                f"cannot write '{self.path / name}': {error.strerror or error}; "
                f"free some space and continue with --resume {self.path}"
            ) from error


def versions() -> dict[str, str]:
    """What the run depends on."""
    found = {"upshot": __version__, "python": sys.version.split()[0], "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _is_io(error: Exception) -> bool:
    """Whether writing failed; safetensors and torch report a full disk by errors of their own."""
    torch_writer = isinstance(error, RuntimeError) and any(
        name in str(error) for name in ("PytorchStreamWriter", "inline_container", "iostream")
    )
    return isinstance(error, OSError) or torch_writer or type(error).__name__ == "SafetensorError"


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"a file could not be written in full ({str(error).splitlines()[0]})"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and value - value != 0 else value


def _parse(text: str) -> dict[str, Any] | None:
    """A line of JSON; None for the torn last line of a killed run."""
    try:
        row = json.loads(text)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def _write_atomic(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text)
    os.replace(temporary, path)
