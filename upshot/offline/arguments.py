"""Parses words of the command line: models, metrics, tasks and their rows, and who takes part."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upshot.api.reward import TokenCounter
from upshot.config.recipe import Named
from upshot.core.conversation import Row
from upshot.core.errors import UserError
from upshot.models.client.budget import Budget
from upshot.models.local import describe_choice, local_path
from upshot.rewards.build import metric_configs
from upshot.rollout.services import Services, Spec, assemble
from upshot.tasks.base import Task, tasks
from upshot.tasks.collabllm import CollabTask
from upshot.tasks.datasets.files import Record, read_table
from upshot.tasks.participants.base import Participant, users
from upshot.tasks.participants.templates import FOLDER

SCRIPT = "script"
"""As the spec of the user: no model; the user says the row's lines (or the sentences of its goal) one by one."""
DUMPED = {"input": "prompt", "output": "completion", "gts": "ground_truth"}
"""Columns of verl's validation and rollout dumps, and our names for them."""
POLICY = "policy "
"""Prefix of the names of policies among the models of the services."""


def read_rows(file: str, limit: int | None = None) -> list[Record]:
    """The rows of a .jsonl, .json, .parquet or .csv file, at least one; verl's dumps with our column names."""
    if not Path(file).is_file():
        raise UserError(f"'{file}' is a folder; name one file" if Path(file).is_dir() else f"no file '{file}'")
    rows = [rename_dumped(row) for row in read_table(Path(file))[:limit]]
    if not rows:
        raise UserError(f"'{file}' has no rows")
    return rows


def rename_dumped(row: Record) -> Record:
    """A row of verl's validation or rollout dump (input, output, gts), renamed to the columns of a row to score."""
    if not DUMPED.keys() <= row.keys():
        return row
    # A value that a verifier reported for some rows only is null in all others.
    others = {key: value for key, value in row.items() if key not in DUMPED and value is not None}
    return {ours: row[theirs] for theirs, ours in DUMPED.items()} | others


def read_mapping(text: str, what: str) -> dict[str, Any]:
    """A YAML mapping given on the command line."""
    import yaml

    from upshot.config.yaml_text import parse_yaml

    try:
        loaded = parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"'{text}' is not a YAML mapping of {what}: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"'{text}' is not a YAML mapping of {what}")
    return loaded


def read_model(spec: Spec) -> Spec:
    """A model as the command line names it.

    A name; a YAML mapping with options ('{url: …, timeout_s: 5}'); or a run folder, which means its best checkpoint.
    """
    if not isinstance(spec, str):
        return spec
    if spec.lstrip().startswith("{"):
        return read_mapping(spec, "a model")
    if chosen := describe_choice(spec):
        print(chosen, file=sys.stderr)
        return f"local:{local_path(spec)}"
    return spec


def read_metrics(texts: Sequence[str]) -> dict[str, Any]:
    """Metrics with weights or settings from NAME, NAME=WEIGHT, several with commas, NAME={…}, or a YAML mapping."""
    metrics: dict[str, Any] = {}
    for text in texts:
        name, settings, rest = text.partition("={")
        if text.lstrip().startswith("{"):
            metrics |= read_mapping(text, "metrics")
        elif settings:
            metrics[name.strip()] = read_mapping("{" + rest, f"settings of '{name.strip()}'")
        else:
            metrics |= dict(_weight(item.strip()) for item in text.split(",") if item.strip())
    return metrics


def _weight(text: str) -> tuple[str, float]:
    name, equals, weight = text.rpartition("=")
    try:
        return (name.strip(), float(weight)) if equals else (text, 1.0)
    except ValueError:
        raise UserError(f"the metric '{text}' should read NAME=WEIGHT, such as token_amount=-0.0001") from None


def task_metrics(text: str | None, task: CollabTask) -> dict[str, Any]:
    """The metrics of `--metrics`; the task's own when nothing is given."""
    if text is not None:
        return read_metrics([text])
    return {name: {"weight": weight, **task.options.get(name, {})} for name, weight in task.metrics.items()}


def open_task(name: str, file: str | None) -> CollabTask:
    """The task behind `--task` (a name, `pkg.mod:Task`, or a file of goals) and `--file`."""
    if name not in tasks and ":" not in name and ("." in name or "/" in name):
        name, file = "collabllm", file or name
    task: Task = tasks.create(name, {"file": file} if file else {}, "--task")
    if not isinstance(task, CollabTask):
        raise UserError(f"task '{name}' has no hidden goals to simulate; use one of the CollabLLM tasks, or a file")
    return task


def rows_of(task: CollabTask, split: str) -> list[Row]:
    """The rows of a split, or of all splits for 'all'."""
    if split != "all":
        return list(task.rows(split))
    return [row for name in ("train", "validation", "test") for row in task.all_rows().get(name, ())]


def build_simulation(
    task: CollabTask,
    policies: Mapping[str, Spec],
    user: Spec | None,
    judge: Spec | None,
    metrics: Mapping[str, Any],
    budget: Budget | None = None,
    tokenizer: str | None = None,
    short: bool = False,
) -> Services:
    """Policies, simulated user, judge and metrics of a simulation, not yet started; equal specs share one model.

    tokenizer: counts the tokens; None: as the policy or its endpoint counts.
    short: use the short templates for user and judge, for small models and small contexts.
    """
    specs = {f"{POLICY}{name}": read_model(spec) for name, spec in policies.items()}
    if user and user != SCRIPT:
        specs["user"] = read_model(user)
    if judge:
        specs["judge"] = read_model(judge)
    person: Named | Participant | None = None
    if user == SCRIPT:
        person = users.create("scripted", {}, "--user")
    elif user:
        person = Named.model_validate({"name": "llm", **({"template": "user_short"} if short else {})})
    if short:
        metrics = {name: _with_short_rubric(name, setting) for name, setting in metrics.items()}
    counter = TokenCounter(tokenizer)
    services = assemble(task, specs, metric_configs(metrics), user=person, budget=budget, tokenizer=counter)
    if len(policies) == 1:  # several policies may have different tokenizers
        counter.policy = services.models[next(iter(specs))]
    return services


def _with_short_rubric(name: str, setting: Any) -> Any:
    """A metric's setting with the short template of its rubric, if there is one and the setting names no rubric."""
    rubric = f"{name}_short"
    if not (FOLDER / f"{rubric}.j2").is_file():
        return setting
    return {"rubric": rubric, **(setting if isinstance(setting, Mapping) else {"weight": setting})}
