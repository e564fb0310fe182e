"""The body of `upshot eval --task …`: open everyone, resume, show progress, make the table."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshot.config.sampling import Sampling
from upshot.core.conversation import Row
from upshot.core.errors import UserError, did_you_mean
from upshot.core.time_limit import call_seconds
from upshot.models.client.budget import Budget
from upshot.offline.data.gather import POLICY, gather, open_task, parse_metrics, read_mapping, read_spec, rows_of
from upshot.offline.data.journal import Journal
from upshot.offline.evaluate.cells import cells, columns_of
from upshot.offline.evaluate.print_table import markdown, print_rich, to_dict
from upshot.offline.evaluate.whole import Evaluation, whole_goals
from upshot.offline.progress import progress
from upshot.rollout.policy import Policy
from upshot.rollout.services import Services, Spec
from upshot.tasks.collabllm import CollabTask, system_prompt
from upshot.tasks.datasets.splits import fingerprint


@dataclass(frozen=True)
class EvaluationPlan:
    """What is to be played."""

    args: argparse.Namespace
    task: CollabTask
    rows: Sequence[Row]
    models: Mapping[str, Spec]
    """Spec by row of the table."""
    systems: Mapping[str, str]
    """System prompt by row of the table: plain, proactive, none or a file."""
    metrics: Mapping[str, Any]

    def identity(self) -> dict[str, Any]:
        """What must stay the same when an evaluation is resumed; models and goals may be added."""
        who, how = ("task", "file", "split", "user", "judge"), ("max_messages", "max_tokens", "temperature", "seed")
        names = (*who, "tokenizer", *how)
        return {**{name: getattr(self.args, name) for name in names}, "metrics": dict(self.metrics)}

    def speaker(self, name: str) -> str:
        """Who a row of the table is: model and system prompt."""
        return f"{self.models[name]} · {self.systems[name]} {fingerprint(system_prompt(self.systems[name]))}"


def run(args: argparse.Namespace) -> int:
    """Play what is not played yet, print the table and save it; 1 when a row has no score of the task metric at all."""
    plan = _plan(args)
    out = Path(args.out or f"eval-{plan.task.name}")
    with (
        Journal(out / "openings.log", plan.identity()) as openings,
        Journal(out / "rollouts.jsonl", None, keep=lambda line: line["missing"] is None) as rollouts,
    ):
        lines = _finished(plan, rollouts.lines)
        stats = asyncio.run(_play(plan, openings, rollouts, lines))
    columns = columns_of(list(plan.metrics), lines, plan.task.table_group)
    found = cells(lines, list(plan.models), columns)
    title = f"{plan.task.name}: {len(plan.rows)} held-out goals"
    content = {**to_dict(title, columns, found), "settings": plan.identity(), "models": plan.models, "stats": stats}
    (out / "table.json").write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    (out / "table.md").write_text(markdown(columns, found), encoding="utf-8")
    scored = all(own[0].estimate is not None for own in found.values())
    if args.json:
        print(json.dumps(content, ensure_ascii=False))
        return 0 if scored else 1
    from rich.console import Console

    console = Console(markup=False)
    print_rich(title, columns, found, console)
    console.print(f"saved in {out}; read the transcripts with: upshot view {out}", highlight=False, soft_wrap=True)
    return 0 if scored else 1


def _plan(args: argparse.Namespace) -> EvaluationPlan:
    """The arguments, checked, before any model is started."""
    if not args.task or not args.models:
        raise UserError("eval needs --task and --models, such as --models base=SPEC,proactive=SPEC,trained=SPEC")
    models = {name: read_spec(spec) for name, spec in parse_models(args.models).items()}
    systems = parse_systems(args.system, list(models))
    task = open_task(args.task, args.file)
    rows = whole_goals(task, _held_out(task, args.split))[: args.goals]
    return EvaluationPlan(args, task, rows, models, systems, parse_metrics(args.metrics, task))


def _finished(plan: EvaluationPlan, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversations of an earlier run that belong to this table."""
    goals = {row.id for row in plan.rows}
    own = [line for line in lines if line["row"] in goals and line["model"] in plan.models]
    for line in own:
        if line["speaker"] != plan.speaker(line["model"]):
            raise UserError(
                f"'{line['model']}' was another model or prompt in the earlier run ({line['speaker']}); "
                f"give the row another name, or use another --out"
            )
    return own


async def _play(
    plan: EvaluationPlan, openings: Journal, rollouts: Journal, lines: list[dict[str, Any]]
) -> dict[str, float]:
    """Play into the journals and `lines`; the counters of models and user."""
    args, models = plan.args, plan.models
    call_seconds.set(args.call_seconds)
    budget = Budget(max_calls=args.max_calls, max_dollars=args.max_dollars)
    if rollouts.lines:
        budget.restore(max((line["spent"] for line in rollouts.lines), key=lambda spent: spent["calls"]))
    people = gather(plan.task, models, args.user, args.judge, plan.metrics, budget, args.tokenizer)
    async with people as services:
        evaluation = Evaluation(
            plan.task,
            services,
            _policies(args, services, plan.systems),
            {name: plan.speaker(name) for name in models},
            args.max_messages or plan.task.max_messages,
            args.seed,
            args.concurrency,
        )
        with progress("conversations", len(plan.rows) * len(models), len(lines), args.quiet or args.json) as show:

            def told(line: dict[str, Any]) -> None:
                lines.append(line)
                show()

            await evaluation.run(plan.rows, openings, rollouts, told)
        return services.stats()


def _policies(args: argparse.Namespace, services: Services, systems: Mapping[str, str]) -> dict[str, Policy]:
    sampling = Sampling(args.max_tokens, args.temperature)
    return {
        name: Policy(services.models[f"{POLICY}{name}"], sampling=sampling, system=system_prompt(system))
        for name, system in systems.items()
    }


def parse_models(text: str) -> dict[str, Spec]:
    """name → spec from `base=SPEC,proactive=SPEC`, or from a YAML mapping of names to specs."""
    if text.lstrip().startswith("{"):
        return {str(name): spec for name, spec in read_mapping(text, "models").items()}
    models: dict[str, Spec] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, spec = item.partition("=")
        if not equals or not name.strip() or not spec.strip():
            raise UserError(f"--models: '{item}' should read name=spec, such as base=http://127.0.0.1:8000/v1#my-model")
        if name.strip() in models:
            raise UserError(f"--models names '{name.strip()}' twice; every row of the table needs its own name")
        models[name.strip()] = spec.strip()
    if not models:
        raise UserError("--models names no model; give base=SPEC,proactive=SPEC,trained=SPEC")
    return models


def parse_systems(given: Sequence[str], models: Sequence[str]) -> dict[str, str]:
    """Which system prompt each row has: as told, else proactive for 'proactive' and plain for the others."""
    systems = {name: "proactive" if name == "proactive" else "plain" for name in models}
    for item in given:
        name, equals, prompt = item.partition("=")
        if not equals or name not in systems:
            raise UserError(
                f"--system '{item}' should read NAME=PROMPT, NAME a row of --models; {did_you_mean(name, models)}"
            )
        system_prompt(prompt)
        systems[name] = prompt
    return systems


def _held_out(task: CollabTask, split: str | None) -> list[Row]:
    if split is None:
        split = next((name for name in ("test", "validation") if task.all_rows().get(name)), "test")
    return rows_of(task, split)
