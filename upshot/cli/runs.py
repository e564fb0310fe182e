"""List run folders; remove, move, annotate or tag them.

List the runs in folders (default: runs), oldest first: state, step, result, when, how their recipes differ. `upshot
runs rm RUN…` removes run folders, `upshot runs mv RUN TO` renames one or moves it into a folder. `upshot runs note RUN
TEXT` and `upshot runs tag RUN TAG…` keep a note and tags on a run, which the page shows; `untag` removes tags.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upshot.run.folder import RunFolder

MOST_DIFFERENCES = 6
"""Keys of a recipe that have a column in the table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    verbs = "[FOLDER… | rm RUN… | mv RUN TO | note RUN TEXT | tag RUN TAG… | untag RUN TAG…]"
    parser.add_argument("words", metavar=verbs, nargs="*", help="folders to list, or what to do")
    parser.add_argument("--yes", action="store_true", help="rm: do not ask for confirmation")
    parser.add_argument("--tag", metavar="TAG", help="list only runs with this tag")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")


def run(args: argparse.Namespace) -> int:
    """List, remove or move."""
    verb, *rest = args.words or [""]
    if verb == "rm":
        return _remove([Path(word) for word in rest], args.yes)
    if verb == "mv":
        return _move([Path(word) for word in rest])
    if verb in ("note", "tag", "untag"):
        return _annotate(verb, rest)
    return _list([Path(word) for word in args.words or ["runs"]], args.json, args.tag)


def _list(folders: Sequence[Path], as_json: bool, tag: str | None) -> int:
    import json

    from upshot.core.errors import UserError
    from upshot.run.folder import find

    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"the folder '{folder}' does not exist; `upshot runs FOLDER` looks in another")
    runs = [run for folder in folders for run in find(folder)]
    rows = describe([run for run in runs if tag is None or tag in run.notes["tags"]])
    if as_json:
        for row in rows:
            print(json.dumps(row))
    elif rows:
        _print(rows)
    else:
        tagged = f" tagged '{tag}'" if tag else ""
        print(f"no runs{tagged} in {', '.join(map(str, folders))}")
    return 0


def describe(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """A row of the table for each run: numbers as numbers, unknown values as None."""
    from upshot.run.folder import METRICS, RECIPE
    from upshot.run.report.compare import differences, result_of, settings_of
    from upshot.run.report.curves import read_curves

    different = differences([settings_of((run.path / RECIPE).read_text("utf-8", "replace")) for run in runs])
    rows = []
    for number, run in enumerate(runs):
        status, result = run.status, result_of(read_curves(run.path / METRICS)) or {}
        row = {"run": str(run.path), "state": _state(run, status), "step": status.get("step")}
        row |= {"steps": status.get("steps"), "metric": result.get("key"), "last": result.get("last")}
        row |= {"best": result.get("best"), "started": run.started, **run.notes}
        rows.append(row | {"differences": {key: values[number] for key, values in different.items()}})
    return rows


def _state(run: RunFolder, status: dict[str, Any]) -> str | None:
    """The state in the status file; 'running' without a process on this machine means that the run was killed."""
    import os
    import socket

    from upshot.run.lock import NAME

    holder = run.read_object(NAME)
    if status.get("state") == "running" and holder.get("host") == socket.gethostname():
        try:
            os.kill(holder["pid"], 0)
        except ProcessLookupError:
            return "killed"
        except PermissionError:  # another user's process
            return "running"
    return status.get("state")


def _print(rows: Sequence[dict[str, Any]]) -> None:
    from datetime import datetime

    from rich.table import Table

    from upshot.run.console import whole_console

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("run", "state", "step", "result", "last", "best", "when", "tags", "differs in"):
        table.add_column(name, justify="right" if name in ("step", "last", "best") else "left", overflow="fold")
    for row in rows:
        step = "" if row["step"] is None else f"{row['step']}/{row['steps']}" if row["steps"] else str(row["step"])
        differences = [f"{key}={value}" for key, value in row["differences"].items()]
        more = f", … ({len(differences) - MOST_DIFFERENCES} more)" if len(differences) > MOST_DIFFERENCES else ""
        when = datetime.fromtimestamp(row["started"]).strftime("%Y-%m-%d %H:%M") if row["started"] else ""
        numbers = ["" if row[name] is None else f"{row[name]:.4g}" for name in ("last", "best")]
        state, metric = row["state"] or "", row["metric"] or ""
        tags, different = ", ".join(row["tags"]), ", ".join(differences[:MOST_DIFFERENCES]) + more
        table.add_row(row["run"], state, step, metric, *numbers, when, tags, different)
    whole_console().print(table)


def _run_folder(path: Path) -> RunFolder:
    """A run folder, or the folder of a demonstration; nothing else is removed or moved."""
    from upshot.core.errors import UserError
    from upshot.core.files import suggest_neighbour
    from upshot.run.folder import RunFolder, is_shown

    if path.is_symlink() or not path.is_dir() or not is_shown(path):
        lacks = "it has none of recipe.yaml, metrics.jsonl, status.json"
        raise UserError(f"'{path}' is not a run folder: {lacks}{suggest_neighbour(path)}")
    return RunFolder(path)


def _annotate(verb: str, words: Sequence[str]) -> int:
    from upshot.core.errors import UserError

    if len(words) < 2:
        raise UserError(f"{verb}: name a run folder and {'a text' if verb == 'note' else 'tags'}")
    run, rest = _run_folder(Path(words[0])), words[1:]
    if verb == "note":
        run.write_notes(note=" ".join(rest))
    else:
        kept = [tag for tag in run.notes["tags"] if tag not in rest]
        run.write_notes(tags=kept if verb == "untag" else [*run.notes["tags"], *rest])
    print(f"{run.path}: {', '.join(run.notes['tags']) or 'no tags'}; {run.notes['note'] or 'no note'}")
    return 0


def _remove(paths: Sequence[Path], sure: bool) -> int:
    import shutil
    import sys

    from upshot.core.errors import UserError

    if not paths:
        raise UserError("rm: name the run folders, as `upshot runs` lists them")
    runs = [_run_folder(path) for path in paths]
    if not sure:
        if not sys.stdin.isatty():
            raise UserError("rm: cannot ask for confirmation without a terminal; add --yes")
        if input(f"remove {', '.join(map(str, paths))} for good? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    for run in runs:
        with run.lock(lambda _: None):  # a run that is being written is refused
            shutil.rmtree(run.path)
        print(f"removed {run.path}")
    return 0


def _move(paths: Sequence[Path]) -> int:
    import shutil

    from upshot.core.errors import UserError
    from upshot.run.folder import is_shown

    if len(paths) != 2:
        raise UserError("mv: name a run folder and its new place")
    run, target = _run_folder(paths[0]), paths[1]
    if target.is_dir():
        target /= run.path.resolve().name
    if target.exists():
        raise UserError(f"'{target}' already exists; choose another name")
    above = [folder for folder in target.resolve().parents if folder not in run.path.resolve().parents]
    if around := next(filter(is_shown, above), None):
        raise UserError(f"'{around}' is a run folder; choose a place outside of it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with run.lock(lambda _: None):
        shutil.move(run.path, target)
    print(target)
    return 0
