"""Who takes part in a simulation: policies, simulated user, judge and metrics, opened from specs and closed again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshot.api import build_metrics
from upshot.chat import Row
from upshot.errors import UserError
from upshot.models.base import Model
from upshot.models.budget import Budget
from upshot.models.connect import connect_all
from upshot.participants.base import Participant, users
from upshot.rewards.build import ARROW
from upshot.rewards.metric import Metric
from upshot.rewards.reward import Weighted
from upshot.tasks.base import Task, tasks
from upshot.tasks.collabllm import CollabTask

Spec = str | Mapping[str, Any]
"""What `connect` takes for a model."""
SCRIPT = "script"
"""As the user's spec: no model, but the row's own lines (or the sentences of its goal) one after another."""


@dataclass(frozen=True)
class Cast:
    """Everyone who is needed to play and score conversations of a task."""

    policies: Mapping[str, Model]
    user: Participant | None
    metrics: Mapping[str, Metric]
    weights: Mapping[str, Weighted]
    budget: Budget
    models: Mapping[str, Model]
    """Policies by name, `user` and `judge`: for their counters."""

    def stats(self) -> dict[str, float]:
        """Counters of all models and of the simulated user."""
        seen: dict[int, dict[str, float]] = {id(model): model.stats() for model in self.models.values()}
        out = {name: value for stats in seen.values() for name, value in stats.items()}
        return {**out, **(self.user.stats() if self.user is not None else {})}


@asynccontextmanager
async def open_cast(
    task: CollabTask,
    policies: Mapping[str, Spec],
    user: Spec | None,
    judge: Spec | None,
    metrics: Mapping[str, Any],
    budget: Budget | None = None,
) -> AsyncIterator[Cast]:
    """Build the metrics, then start all models; roles with the same spec share one model."""
    budget = budget or Budget()
    specs = {f"policy {name}": read_spec(spec) for name, spec in policies.items()}
    if user and user != SCRIPT:
        specs["user"] = read_spec(user)
    if judge:
        specs["judge"] = read_spec(judge)
    async with AsyncExitStack() as stack:
        models = connect_all(specs, budget=budget)
        sandbox = await _sandbox(stack) if _needs_sandbox(metrics) else None
        context = {"judge": models.get("judge"), "models": models, "tokenizer": None, "task": task, "sandbox": sandbox}
        built, weights = build_metrics(metrics, context)
        for metric in built.values():
            stack.push_async_callback(metric.aclose)
        person = _user(task, user, models.get("user"))
        if person is not None:
            stack.push_async_callback(person.aclose)
        for model in {id(model): model for model in models.values()}.values():  # last: names are checked by now
            await stack.enter_async_context(model)
        yield Cast({name: models[f"policy {name}"] for name in policies}, person, built, weights, budget, models)


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
        from upshot.train.folder import RunFolder

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


def _user(task: CollabTask, spec: Spec | None, model: Model | None) -> Participant | None:
    if spec == SCRIPT:
        return users.create("scripted", {}, "--user")
    if model is None:
        return None
    return users.create("llm", {"task_description": task.description}, "--user", model=model)


def _needs_sandbox(metrics: Mapping[str, Any]) -> bool:
    return any(name.split(ARROW)[-1].strip() == "pass_rate" for name in metrics)


async def _sandbox(stack: AsyncExitStack) -> Any:
    from upshot.sandbox import connect

    runner = connect("local")
    stack.push_async_callback(runner.aclose)
    return runner
