"""`upshot eval --task … --models base=…,proactive=…,trained=…`: the paper's table from whole conversations.

Every model talks to the same users with held-out goals, who open with the same words. A finished conversation is a line
of `rollouts.jsonl`, an opening is a line of `openings.log`. A conversation that failed has no scores but a reason. It
never counts as zero, and the same command plays it again.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, Row, Turn, derive_seed
from upshot.core.errors import UserError, did_you_mean
from upshot.offline.arguments import (
    POLICY,
    build_simulation,
    open_task,
    read_mapping,
    read_model,
    rows_of,
    task_metrics,
)
from upshot.offline.job import Job
from upshot.offline.table import Line
from upshot.rewards.credit import combine
from upshot.rewards.metric import score_conversation
from upshot.rollout.episode import Policy, catch_failure, play_whole
from upshot.rollout.play import Opening, open_by
from upshot.rollout.reply import reward_to_dict, turns_to_list
from upshot.rollout.services import Services, Spec
from upshot.tasks.base import groups_of
from upshot.tasks.collabllm import CollabTask, system_prompt
from upshot.tasks.datasets.splits import fingerprint, goal_key

WHO = ("task", "file", "split", "user", "judge", "tokenizer")
SETTINGS = (*WHO, "max_messages", "max_tokens", "temperature", "seed")


class Evaluation:
    """Plays and scores every goal with every model."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Check the arguments, before any model is started."""
        if not args.task or not args.models:
            raise UserError("eval needs a RECIPE, or --task and --models, such as --models base=SPEC,trained=SPEC")
        self.args = args
        self.models = {name: read_model(spec) for name, spec in parse_models(args.models).items()}
        self.systems = parse_systems(args.system, list(self.models))
        """System prompt by row of the table: plain, proactive, none or a file."""
        self.speakers = {
            name: f"{self.models[name]} · {prompt} {fingerprint(system_prompt(prompt))}"
            for name, prompt in self.systems.items()
        }
        self.task = open_task(args.task, args.file)
        self.name = self.task.name
        self.table_group: str | None = self.task.table_group
        splits = (name for name in ("test", "validation") if self.task.all_rows().get(name))
        split = args.split or next(splits, "test")
        self.rows = whole_goals(self.task, rows_of(self.task, split))[: args.goals]
        self.metrics = task_metrics(args.metrics, self.task)
        self.settings = {name: getattr(args, name) for name in SETTINGS} | {"metrics": dict(self.metrics)}
        self.lines: list[Line] = []
        self._openings: dict[str, asyncio.Task[Opening]] = {}
        self._opened: dict[str, Line] = {}

    async def play(self, job: Job) -> dict[str, float]:
        """Play all conversations that are not finished yet; returns the counters of models and user."""
        args, done = self.args, {line["key"] for line in self.lines}
        sampling = Sampling(args.max_tokens, args.temperature)
        who = (self.models, args.user, args.judge, self.metrics)
        services = build_simulation(self.task, *who, job.budget, args.tokenizer)
        async with services:
            policies = {
                name: Policy(services.models[f"{POLICY}{name}"], sampling=sampling, system=system_prompt(system))
                for name, system in self.systems.items()
            }

            async def one(piece: tuple[Row, str]) -> None:
                row, name = piece
                line = await self._conversation(row, name, policies[name], services, job)
                self.lines.append(line)
                job.write(line, failure=line["missing"])

            todo = [(row, name) for row in self.rows for name in self.models if key_of(row, name) not in done]
            if todo:
                opened = job.log.lines_of("row", "turns", "session", "counts")
                self._opened = {line["row"]: line for line in opened}
            await job.run(todo, one, len(done))
            return services.stats()

    async def _open(self, row: Row, services: Services, job: Job) -> Opening:
        """The user's opening."""
        line = self._opened.get(row.id)
        if line is not None:
            turns = tuple(Turn(Message(t["role"], t["content"]), note=t["note"]) for t in line["turns"])
            return Opening(turns, line["session"], counts=line["counts"])
        conversation = Conversation(row, derive_seed(self.args.seed, row.id))
        opening = Opening(conversation.turns)
        if not any(message.role == "user" for message in row.messages):
            opening = await open_by(services.user, conversation)
        if opening.failure is None:  # the next run retries one that failed
            spoken = [{**turn.message.to_dict(), "note": dict(turn.note)} for turn in opening.turns]
            kept = {"session": opening.session, "counts": opening.counts}
            job.log.append({"row": row.id, "missing": None, "turns": spoken, **kept})
        return opening

    async def _conversation(self, row: Row, name: str, policy: Policy, services: Services, job: Job) -> dict[str, Any]:
        """One whole conversation and its scores, as a line of `rollouts.jsonl`."""
        if row.id not in self._openings:  # played once; the same for every model
            self._openings[row.id] = asyncio.create_task(self._open(row, services, job))
        opening = await self._openings[row.id]
        conversation = Conversation(row, derive_seed(self.args.seed, row.id), key_of(row, name), opening.turns)
        conversation.session, conversation.counts = copy.deepcopy(dict(opening.session)), opening.counts
        failure = opening.failure
        if failure is None:
            longest = self.args.max_messages or self.task.max_messages
            failure = await catch_failure(play_whole(conversation, policy, services.user, longest), "conversation")
        metrics = services.metrics
        scores = dict.fromkeys(metrics, failure) if failure else await score_conversation(metrics, conversation)
        return {
            "step": 0,
            "row": row.id,
            "key": conversation.key,
            "model": name,
            "speaker": self.speakers[name],
            "messages": [{"note": {}, **turn} for turn in turns_to_list(conversation.turns, trained=False)],
            "ended": conversation.ended,
            "missing": None if failure is None else str(failure.reason),
            "futures": [],
            "reward": reward_to_dict(combine([scores], services.weights)),
            "scores": {metric: score.to_dict() for metric, score in scores.items()},
            "metrics": dict(conversation.counts),
            "groups": {"model": name, **groups_of(self.task, row)},
        }


def key_of(row: Row, model: str, number: int = 0) -> str:
    """The name of a model's conversation about a goal, or of one of its replies to a row."""
    return f"{row.id}@{model}" + (f"#{number}" if number else "")


def whole_goals(task: CollabTask, rows: Sequence[Row]) -> list[Row]:
    """One row per goal, with the user's first words at most; each model has its own system prompt."""
    goals: dict[str, Row] = {}
    for row in rows:
        key = goal_key(row)
        spoken = () if task.user_opens else tuple(m for m in row.messages if m.role != "system")
        goals.setdefault(key, replace(row, id=f"{task.name}/{fingerprint(key)}", messages=spoken))
    return list(goals.values())


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


def parse_systems(items: Sequence[str], models: Sequence[str]) -> Mapping[str, str]:
    """The system prompt of each row: as given, or else proactive for the row 'proactive' and plain for the others."""
    systems = {name: "proactive" if name == "proactive" else "plain" for name in models}
    for item in items:
        name, equals, prompt = item.partition("=")
        if not equals or name not in systems:
            nearest = did_you_mean(name, models)
            raise UserError(f"--system '{item}' should read NAME=PROMPT, NAME a row of --models; {nearest}")
        system_prompt(prompt)
        systems[name] = prompt
    return systems
