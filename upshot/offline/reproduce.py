"""`upshot reproduce PAPER/TABLE`: the stages of a published table, and our numbers beside the published ones.

A file below recipes/papers/ lists the stages. Each is a command of this project (`train RECIPE key=value …`, `data
prepare …`, `eval …`) whose results go to a folder of its name. Finished stages are noted in stages.json and not
repeated; an interrupted training is resumed, and every other command continues where it stopped by itself. Differences
from the published settings are found by comparing them with the recipes of the stages. `costs.py` estimates the cost.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

from upshot.config.layers import differences, flatten, merge
from upshot.config.load import RECIPES, load_recipe, read_yaml
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError, did_you_mean
from upshot.core.files import write_atomic, write_json
from upshot.offline.costs import describe_costs
from upshot.offline.sweep import TABLE
from upshot.run.console import print_rows
from upshot.run.folder import RunFolder, with_whole_paths
from upshot.verl.plan import is_theirs

FOLDER = RECIPES / "papers"
DONE = "stages.json"
Command = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class PaperStage:
    """A command, and the folder of its results."""

    name: str
    words: tuple[str, ...]
    folder: Path
    on_verl: bool = False
    theirs: tuple[str, ...] = ()
    """verl's own `key=value` for a stage that runs on verl: these set machines, not the recipe."""

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of a training; None for any other command."""
        return load_recipe(self.words[1], self.words[2:]).recipe if self.words[0] == "train" else None

    @property
    def begun(self) -> Recipe | None:
        """The recipe of a training that has begun, which is the one that is resumed."""
        run = RunFolder(self.folder)
        return run.recipe if self.words[0] == "train" and run.begun else None

    @property
    def command(self) -> list[str]:
        """The command line to run now: a training that has begun is resumed."""
        words = ["train", "--resume", str(self.folder)] if self.begun else list(self.words)
        return [*words, *self.theirs, "--engine", "verl"] if self.on_verl else words


@dataclass(frozen=True)
class ChangedSetting:
    """A setting that is not the published one."""

    stage: str
    key: str
    published: Any
    ours: Any
    reason: str

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.stage}: {self.key} is {self.ours}; published: {self.published}{why}"


class Paper:
    """A published table, with the settings that a command line asks for."""

    def __init__(
        self,
        name: str,
        task: str | None = None,
        out: Path | None = None,
        small: bool = False,
        overrides: Sequence[str] = (),
        verl: Sequence[str] = (),
    ) -> None:
        self.file, shared = read_paper(name)
        tasks = self.file.get("tasks", {"": {}})
        if task is not None and task not in tasks:
            raise UserError(f"{name} has no task '{task}'; {did_you_mean(task, [one for one in tasks if one])}")
        self.name, self.task = name, next(iter(tasks)) if task is None else task
        whole = "-".join(filter(None, (shared.replace("/", "-"), self.task, "small" if small else "")))
        self.out = out or Path("runs") / whole
        smaller = self.file["small"] if small else {}
        commands = {**smaller.get("stages", {}), **self.file["stages"]}
        self._more: dict[str, list[str]] = {key: [text] for key, text in smaller.get("more", {}).items()}
        self._variables = {**self.file.get("variables", {}), **smaller.get("variables", {})}
        self._values = {"task": self.task, "here": str(FOLDER), **tasks[self.task], **self._variables}
        self._phrases = {**self.file.get("phrases", {}), **smaller.get("phrases", {})}
        for word in overrides:
            self._set(word, commands)
        self._values |= {stage: str(self.out / stage) for stage in commands}
        for stage in verl:
            if not commands.get(stage, "").startswith("train "):
                trained = [name for name, text in commands.items() if text.startswith("train ")]
                raise UserError(f"--verl {stage}: no training has that name; {did_you_mean(stage, trained)}")
        self.stages = [self._stage(stage, text, stage in verl) for stage, text in commands.items()]

    def _set(self, word: str, commands: Mapping[str, str]) -> None:
        """Apply VARIABLE=VALUE, or STAGE.KEY=VALUE, which changes the recipe of one training."""
        key, equals, value = word.partition("=")
        stage, dot, _ = key.partition(".")
        if equals and dot and commands.get(stage, "").startswith("train "):
            self._more.setdefault(stage, []).append(shlex.quote(word.removeprefix(f"{stage}.")))
        elif equals and key in self._variables:
            self._values[key] = value
        else:
            known = [*self._variables, *(f"{name}.KEY" for name in commands)]
            raise UserError(f"'{word}' should read NAME=VALUE with a name of {self.name}: {', '.join(known)}")

    def _stage(self, name: str, text: str, on_verl: bool) -> PaperStage:
        verb = text.split()[0]
        shared = self._more.get(verb, ()) if name in self.file["stages"] else ()
        words = self._words(" ".join([text, *shared, *self._more.get(name, ())]))
        theirs = tuple(word for word in words if on_verl and is_theirs(word))
        words = [word for word in words if word not in theirs]
        folder = self.out / name
        where = [f"run_dir={json.dumps(str(folder))}"] if verb == "train" else ["--out", str(folder)]
        return PaperStage(name, (*words, *where), folder, on_verl, theirs)

    def _words(self, text: str) -> list[str]:
        """The words of a text, with phrases (several words each) and variables filled in."""
        words: list[str] = []
        for word in shlex.split(text):
            phrase = self._phrases.get(word.removeprefix("$")) if word.startswith("$") else None
            words += [self.fill(word)] if phrase is None else self._words(phrase)
        return words

    def fill(self, value: Any) -> Any:
        """A value with its variables filled in, recursively."""
        while isinstance(value, str) and "$" in value:
            try:
                filled = Template(value).substitute(self._values)
            except (KeyError, ValueError) as error:
                raise UserError(f"{self.name}: unknown name in '{value}': {error}") from None
            if filled == value:
                break
            value = filled
        return value

    def differences(self) -> list[ChangedSetting]:
        """Where the stages differ from the published settings."""
        reasons: Mapping[str, str] = self.file.get("reasons", {})
        changed = []
        for stage in self.stages:
            published = {key: self.fill(value) for key, value in self.file["published"].get(stage.name, {}).items()}
            recipe = stage.recipe
            # For a stage that does not train: the variables, and its options.
            options = {name: self.fill(value) for name, value in self._values.items()} | dict(pairwise(stage.words))
            ours = dict(flatten(recipe.model_dump(mode="json"))) if recipe else options
            for key, value in published.items():
                if not _same(ours.get(key), value):
                    reason = reasons.get(f"{stage.name}.{key}", reasons.get(key, ""))
                    changed.append(ChangedSetting(stage.name, key, value, ours.get(key), reason))
        return changed

    def table(self) -> list[list[str]]:
        """The table, as 'ours (published)': a head, and a row for each of our rows."""
        about = self.file["table"]
        cells = _read_cells(self.out / about["stage"], about)
        published = about.get("published", {})
        known = published.get(self.task, published) if self.task else published
        rows = [["", *about["columns"]]]
        for row, values in cells.items():
            beside = [*known.get(row, ()), *[None] * len(values)]
            rows.append([row, *(_cell(ours, other) for ours, other in zip(values, beside, strict=False))])
        return rows


def read_paper(name: str) -> tuple[dict[str, Any], str]:
    """A file merged over the files it extends, and the table whose folder it uses: that of the file it extends, whose
    stages it shares, unless it gives a variable or phrase of these stages another value."""
    file = FOLDER / f"{name}.yaml"
    if not file.is_file():
        raise UserError(f"unknown table '{name}'; {did_you_mean(name, list_papers())}")
    paper: dict[str, Any] = read_yaml(file, "paper")
    parent = paper.pop("extends", "")
    base, folder = read_paper(parent) if parent else ({}, name)
    if any(paper.get(section, {}).keys() & base.get(section, {}).keys() for section in ("variables", "phrases")):
        folder = name
    for section in ("tasks", "table", "notes"):  # a file with its own table does not inherit these
        base.pop(section, None) if section in paper else None
    merge(base, paper)
    base["stages"] = {stage: text for stage, text in base["stages"].items() if text is not None}
    return base, folder


def _same(ours: Any, published: Any) -> bool:
    """Whether two settings are equal; a number that was written as text is a number."""
    try:
        return bool(float(ours) == float(published))
    except (TypeError, ValueError):
        return str(ours) == str(published)


def _cell(ours: Mapping[str, Any], published: float | None) -> str:
    mean, missing = ours.get("mean"), ours.get("missing")
    shown = "–" if mean is None else f"{mean:.2f}" if abs(mean) < 10 else f"{mean:.1f}"
    return shown + ("" if published is None else f" ({published:g})") + (f", {missing} missing" if missing else "")


def _read_cells(folder: Path, about: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Our numbers by row: of an evaluation, of a sweep, or the last ones in the metrics of trainings (`runs`)."""
    if "runs" in about:
        lines = {row: RunFolder(folder.parent / stage).metrics for row, stage in about["runs"].items()}
        return {row: [{"mean": _last(of_row, key)} for key in about["metrics"]] for row, of_row in lines.items()}
    if (folder / TABLE).is_file():
        rows = json.loads((folder / TABLE).read_text(encoding="utf-8"))["rows"]
        return {row["setting"]: list(row["metrics"].values()) for row in rows}
    cells = json.loads((folder / "table.json").read_text(encoding="utf-8"))["cells"]
    return {row: [{**cell, "missing": sum(cell["missing"].values())} for cell in cells[row].values()] for row in cells}


def _last(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return next((float(line[key]) for line in reversed(lines) if line.get(key) is not None), None)


def list_papers() -> list[str]:
    """The names of all tables."""
    return sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.yaml"))


def run(args: argparse.Namespace, command: Command) -> int:
    """Run the stages that are not done, and print the table; `command` runs one command line of Upshot."""
    out = Path(args.out) if args.out else None
    paper = Paper(args.paper, args.task, out, args.small, args.overrides, args.verl)
    stages = {stage.name: (stage.words, shlex.join(stage.command)) for stage in paper.stages}
    examples = int(paper.fill("$examples"))
    *each, in_all = describe_costs(stages, paper.fill("$model"), examples, paper.file.get("assume", {}))
    print("\n".join([*each, in_all] if args.dry_run else [in_all]), flush=True)
    if args.dry_run:
        print(f"data that are not prepared yet are assumed to have {examples} examples")
        print_differences(paper)
        return 0
    paper.out.mkdir(parents=True, exist_ok=True)
    for stage in paper.stages:
        run_stage(paper.out / DONE, stage, command)
    print_paper(paper)
    return 0


def run_stage(record: Path, stage: PaperStage, command: Command) -> None:
    """Run a stage unless it is done, and record that it is done."""
    done: dict[str, list[str]] = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    words = list(stage.words)
    if done.get(stage.name) == words:
        print(f"— {stage.name}: done before, in {stage.folder}", flush=True)
        return
    other = done.get(stage.name, [])
    if stage.begun is not None and stage.recipe is not None:
        changed = differences(with_whole_paths(stage.begun), with_whole_paths(stage.recipe))
        other = other or [f"{key}={value}" for key, (value, _) in changed.items()]
    if other:
        raise UserError(f"'{stage.folder}' was made with other settings ({shlex.join(other)}); choose another --out")
    print(f"— {stage.name}: upshot {shlex.join(stage.command)}", flush=True)
    if stage.on_verl:  # which may replace the process that starts it
        code = subprocess.run([sys.executable, "-m", "upshot.cli", *stage.command], check=False).returncode
    else:
        code = command(stage.command)
        gc.collect()  # frees the memory of the stage, on the device as well
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()
    if code == 130:  # Ctrl-C, which has been reported
        raise KeyboardInterrupt
    if code:
        raise UserError(f"the stage '{stage.name}' ended with status {code}; the same command continues from there")
    write_json(record, {**done, stage.name: words})


def print_paper(paper: Paper) -> None:
    """The table on a terminal, what differs below it; as Markdown in OUT/table.md."""
    head, *rows = paper.table()
    title = f"{paper.file['title']}{f', {paper.task}' if paper.task else ''}: ours (published)"
    print(title)
    print_rows(head, rows)
    lines = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]
    differences = [f"- {line}" for line in tell_differences(paper)]
    write_atomic(paper.out / "table.md", "\n".join([title, "", *lines, "", *differences, ""]).encode())
    print_differences(paper)
    print(f"saved in {paper.out}")


def tell_differences(paper: Paper) -> list[str]:
    """What differs from the paper, one line each: our settings, then notes that hold for every run."""
    return [*map(str, paper.differences()), *paper.file.get("notes", ())]


def print_differences(paper: Paper) -> None:
    """What differs from the paper."""
    print("\n".join(["differs from the published settings:", *(f"  {line}" for line in tell_differences(paper))]))
