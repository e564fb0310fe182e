"""What building and evaluating read from the command line: task, models, metrics, and who takes part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upshot.api.scorer import TokenCounter
from upshot.config.recipe import Named
from upshot.core.conversation import Row
from upshot.core.errors import UserError
from upshot.models.client.budget import Budget
from upshot.rewards.build import metric_configs
from upshot.rollout.services import Services, Spec, assemble
from upshot.tasks.base import Task, tasks
from upshot.tasks.collabllm import CollabTask
from upshot.tasks.participants.base import Participant, users
from upshot.tasks.participants.templates import FOLDER

SCRIPT = "script"
"""As the user's spec: no model, but the row's own lines (or the sentences of its goal) one after another."""
POLICY = "policy "
"""What the names of policies begin with among the models of the services."""


def gather(
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

    tokenizer: whose tokens are counted; None: as the policy or its endpoint counts.
    short: user and judge are asked with the short templates, for small models and small contexts.
    """
    specs = {f"{POLICY}{name}": read_spec(spec) for name, spec in policies.items()}
    if user and user != SCRIPT:
        specs["user"] = read_spec(user)
    if judge:
        specs["judge"] = read_spec(judge)
    person: Named | Participant | None = None
    if user == SCRIPT:
        person = users.create("scripted", {}, "--user")
    elif user:
        person = Named.model_validate({"name": "llm", **({"template": "user_short"} if short else {})})
    if short:
        metrics = {name: _shortly(name, setting) for name, setting in metrics.items()}
    counter = TokenCounter(tokenizer)
    services = assemble(task, specs, metric_configs(metrics), user=person, budget=budget, tokenizer=counter)
    if len(policies) == 1:  # several speak in tongues of their own
        counter.policy = services.models[next(iter(specs))]
    return services


def _shortly(name: str, setting: Any) -> Any:
    """A metric's setting with the short template of its rubric, where it has one and names none."""
    rubric = f"{name}_short"
    if not (FOLDER / f"{rubric}.j2").is_file():
        return setting
    options = dict(setting) if isinstance(setting, Mapping) else {"weight": setting}
    return {"rubric": rubric, **options}


def open_task(name: str, file: str | None, **options: Any) -> CollabTask:
    """The task behind `--task` (a name, `pkg.mod:Task`, or a file of goals) and `--file`."""
    if name not in tasks and ":" not in name and ("." in name or "/" in name):
        name, file = "collabllm", file or name
    given = {"file": file, **options}
    task: Task = tasks.create(name, {key: value for key, value in given.items() if value is not None}, "--task")
    if not isinstance(task, CollabTask):
        raise UserError(f"task '{name}' has no hidden goals to simulate; use one of the CollabLLM tasks, or a file")
    return task


def rows_of(task: CollabTask, split: str) -> list[Row]:
    """The rows of a split, or of all splits for 'all'."""
    if split != "all":
        return list(task.rows(split))
    return [row for name in ("train", "validation", "test") for row in task.all_rows().get(name, ())]


def parse_metrics(text: str | None, task: CollabTask) -> dict[str, Any]:
    """Metrics and weights from `name=weight,…` or a YAML mapping; the task's own when nothing is given."""
    if text is None:
        return {name: {"weight": weight, **task.options.get(name, {})} for name, weight in task.metrics.items()}
    if text.lstrip().startswith("{"):
        return read_mapping(text, "metrics")
    out: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, weight = item.rpartition("=")
        try:
            out[name if equals else item] = float(weight) if equals else 1.0
        except ValueError as error:
            raise UserError(f"--metrics: the weight of '{name}' is '{weight}', which is no number") from error
    return out


def read_spec(spec: Spec) -> Spec:
    """A model as the command line names it.

    A name; a YAML mapping with options ('{url: …, timeout_s: 5}'); or a run folder, which means its newest checkpoint.
    """
    if not isinstance(spec, str):
        return spec
    if spec.lstrip().startswith("{"):
        return read_mapping(spec, "a model")
    run = Path(spec).expanduser()
    if (run / "checkpoints").is_dir():
        from upshot.run.folder import RunFolder

        newest = RunFolder(run).latest()
        if newest is None:
            raise UserError(f"the run folder '{spec}' has no checkpoint yet")
        return f"local:{newest[0]}"
    return spec


def read_mapping(text: str, what: str) -> dict[str, Any]:
    """A YAML mapping of the command line."""
    import yaml

    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"'{text}' is no YAML mapping of {what}: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"'{text}' is no YAML mapping of {what}")
    return loaded
