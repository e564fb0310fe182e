"""`upshot logs prepare FILES… --out DIR`: rows, a user, its realism and validity, and a recipe, stage by stage.

`DIR/prepare.log` has the settings, the spending, and the finished stages; goals, the fitted user, realism and validity
each continue where they stopped. Conversations are in `DIR/conversations.sqlite`; only a few are in memory at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from upshot.api.reward import open_scorer
from upshot.config.load import load_recipe
from upshot.config.model_spec import ModelSpec
from upshot.core.errors import UserError
from upshot.core.files import write_atomic, write_json, write_jsonl
from upshot.models.client.budget import Budget
from upshot.offline import user as realism
from upshot.offline.arguments import read_model
from upshot.offline.job import Job, Journal
from upshot.offline.logs import goals, validity
from upshot.offline.logs.look import print_survey, reader_of
from upshot.offline.logs.page import write_page
from upshot.offline.logs.read import LoggedConversation
from upshot.offline.logs.rows import WithGoal, write_rows
from upshot.offline.logs.signs import Survey
from upshot.offline.logs.store import TalkStore, to_dict
from upshot.rollout.services import assemble
from upshot.run import checks
from upshot.tasks.logs import VALIDITY

KEPT = (
    *("files", "outcome", "customer", "time", "kind", "roles", "keep_personal", "model", "fit_user", "base", "steps"),
    *("context", "conversations", "good_from", "held_out", "replies", "samples", "rounds", "max_tokens", "seed"),
)
"""Options that must stay the same when a preparation is resumed."""
TINY = "tiny"
"""The value of --base for a new model that knows only the words of the logs, for trials on a CPU."""
SHORTEST = 512
"""The smallest context of a fitted model, in tokens."""
LEARNS = {
    True: "Learns from outcomes alone: compare with sft on sft_train.parquet.",
    False: "The logs have no outcomes (--outcome FIELD), so this imitates the assistant as it is. To train in a "
    "simulation, extend the recipe 'logs' with a reward of your own.",
}
"""What a recipe without a simulation does, with outcomes (True) and without."""
REALISM = 30
"""The number of held-out conversations in which the simulated user is compared with people."""


def run(args: argparse.Namespace) -> int:
    """Run the stages that are not done yet, and print all results."""
    if args.base == TINY and not args.fit_user:
        raise UserError("--base tiny starts from a new, untrained model; add --fit-user, or name another --base")
    try:
        with Journal(Path(args.out) / "prepare.log", {name: getattr(args, name) for name in KEPT}) as log:
            return Preparation(args, log).run()
    except (sqlite3.Error, OSError) as error:
        if getattr(error, "filename", None):  # a file cannot be opened: its own message says enough
            raise
        way_out = "finished work is kept: fix the cause and run the same command again"
        raise UserError(f"cannot continue in '{args.out}': {error}; {way_out}") from error


@dataclass(frozen=True)
class Player:
    """Who plays the user, and with whom."""

    spec: str
    policy: str
    kind: str
    options: Mapping[str, Any]


class Preparation:
    """The stages, and the data they pass on."""

    def __init__(self, args: argparse.Namespace, log: Journal) -> None:
        self.args, self.log, self.out = args, log, Path(args.out)
        self.done = {line["stage"] for line in log.lines if "stage" in line}
        self.store = TalkStore(self.out / "conversations.sqlite")
        self.goals: dict[str, dict[str, Any]] = {}
        """The goals and facts that a model extracted, by conversation."""
        self.budget: Budget | None = None
        self.findings: list[str] = []

    def run(self) -> int:
        """All stages in their order."""
        self.stage("read", self.read)
        summary = json.loads((self.out / "survey.json").read_text("utf-8"))
        ((count, held, least, most),) = self.store.rows("count(*), sum(held), min(outcome), max(outcome)")
        total = summary["survey"]["conversations"]
        rest = f"; no rows are made from the other {total - count:,} (--conversations)" if total > count else ""
        self.findings += self.store.describe_repeats()
        self.findings.append(f"held out {summary['held_out']}: {held:,} of {count:,} conversations{rest}")
        if self.args.model:
            asyncio.run(self.extract())
            self.findings.append(goals.tell_goals(self.goals, count))
        ((judged,),) = self.store.rows("count(outcome) > 0", "NOT held")
        good_from = self.args.good_from
        if good_from is None:
            good_from = 1.0 if most is None else (least + most) / 2
        ((good, bad),) = self.store.rows("sum(outcome >= ?1), sum(outcome < ?1)", "1", good_from)
        if most is not None:
            self.findings.append(
                f"good outcomes are those from {good_from:g} (--good-from): {good:,}; bad ones: {bad:,}"
            )
        rows = self.out / "rows.json"
        self.stage("rows", lambda: write_json(rows, write_rows(self.out, self.talks, good_from, judged)))
        self.findings.append(
            "rows: " + ", ".join(f"{name} {size:,}" for name, size in json.loads(rows.read_text()).items())
        )
        if self.args.fit_user:
            context, notes = context_of([words for (words,) in self.store.rows("words")], self.args.context)
            self.findings += notes
            self.stage("fit", lambda: self.fit(context))
        player, measured, likeness = self.player(), None, None
        note = LEARNS[judged]
        if player is not None:
            likeness = self.compare_with_people(player)
            measured = asyncio.run(self.validate(player, good_from))
            self.findings.append(measured["text"])
            note = measured["text"] if judged else note
        self.stage("recipe", lambda: self.write_training(player, judged, note))
        checks.refuse(checks.find(load_recipe(str(self.out / "recipe.yaml"), []).recipe, offline=True))
        self.finish(measured, likeness)
        return 0

    def talks(self, split: str) -> Iterator[WithGoal]:
        """Conversations of a split with their goals: what a model extracted, else the user's first words."""
        return ((talk, self.goal_of(talk)) for talk in self.store.read("held = ?", split != "train"))

    def goal_of(self, talk: LoggedConversation) -> str:
        """What the user of a conversation wanted, if it is known."""
        return goals.goal_text(self.goals.get(talk.place)) or talk.messages[0].content

    def finish(self, measured: dict[str, Any] | None, likeness: dict[str, Any] | None) -> None:
        """Write the page and print all results."""
        summary, recipe = json.loads((self.out / "survey.json").read_text("utf-8")), self.out / "recipe.yaml"
        account = [*summary["account"], *self.findings]
        shown = {name: summary[name] for name in ("survey", "telling")}
        write_page(self.out / "logs.html", account, **shown, validity=measured)
        if self.args.json:
            print(json.dumps({"validity": measured, "realism": likeness, "recipe": str(recipe), "account": account}))
        else:
            print_survey(summary["survey"], account, summary["records"])
            print(f"page    {self.out / 'logs.html'}\nrecipe  {recipe} (its dry run passes): upshot train {recipe}")

    def job(self, what: str, results: Journal) -> Job:
        """A job whose budget includes the spending of the jobs before it."""
        job = Job(what, self.args, self.log, results)
        if self.budget is not None:
            job.budget.restore(self.budget.state())
        self.budget = job.budget
        return job

    def stage(self, name: str, work: Callable[[], object]) -> None:
        """Run a stage unless it is done, and record that it is done."""
        if name not in self.done:
            work()
            self.log.append({"stage": name})

    def read(self) -> None:
        """Read the conversations, mask them, survey them, and hold some out."""
        reader, survey = reader_of(self.args), Survey()

        def surveyed() -> Iterator[LoggedConversation]:
            for talk in reader:
                survey.add(talk)
                yield talk

        self.store.fill(surveyed(), self.args.conversations)
        if not survey.conversations:
            reasons = "; ".join(reader.account()) or "no records"
            raise UserError(f"no conversation in {', '.join(self.args.files)}: {reasons}")
        how = self.store.hold_out(self.args.held_out, self.args.seed)
        ((count, held),) = self.store.rows("count(*), sum(held)")
        if not 0 < held < count:
            way_out = "give more logs, another --held-out or another --customer"
            raise UserError(
                f"{held:,} of {count:,} conversations are held out ({how}); both sides need some: {way_out}"
            )
        summary = {"records": reader.records, "survey": survey.to_dict(), "account": reader.account()} | {
            "held_out": how
        }
        write_json(self.out / "survey.json", {**summary, "telling": [to_dict(talk) for talk in survey.telling()]})

    async def extract(self) -> None:
        """Extract the goals by conversation; model calls are cached."""
        spec = ModelSpec.parse(read_model(self.args.model), "--model")
        cached = spec.model_copy(update={"cache": str(self.out / "cache")})
        with Journal(self.out / "goals.jsonl", keep=lambda line: "missing" not in line) as results:
            self.goals = {line["place"]: line for line in results.lines}
            job = self.job("conversations", results)
            async with assemble(None, {"extract": cached}, budget=job.budget) as services:
                await goals.extract_goals(job, services.models["extract"], self.store, self.goals)

    def fit(self, context: int) -> None:
        """Fine-tune a model on the user, the outcomes and the assistant of the train conversations."""
        from upshot.run.console import make_reporter
        from upshot.run.folder import RunFolder
        from upshot.run.run import train

        recipe, run = load_recipe(str(self.write_fit(context)), []).recipe, self.out / "fitted"
        folder = RunFolder.open(run) if (run / "recipe.yaml").is_file() else None
        train(recipe, folder, make_reporter(self.args.quiet, False))

    def player(self) -> Player | None:
        """Who plays the user; None if there is neither a model nor a fitted user."""
        if self.args.fit_user:
            fitted = str(self.out / "fitted")
            return Player(fitted, fitted, "plain", {"max_tokens": self.args.max_tokens})
        return Player(self.args.model, self.args.base, "llm", {}) if self.args.model else None

    def compare_with_people(self, player: Player) -> dict[str, Any]:
        """`upshot eval user` on held-out conversations."""
        file, some = self.out / "held_out.jsonl", islice(self.talks("validation"), REALISM)
        write_jsonl(file, [{"messages": [m.to_dict() for m in talk.messages], "goal": goal} for talk, goal in some])
        named = {"file": str(file), "user": player.spec, "kind": player.kind, "limit": None}
        named |= {"settings": json.dumps(player.options), "out": str(self.out / "realism.jsonl")}
        report, lines = realism.compare(argparse.Namespace(**{**vars(self.args), **named}))
        self.findings += lines
        return report

    async def validate(self, player: Player, good_from: float) -> dict[str, Any]:
        """Simulate futures of held-out replies and compare their scores with the real outcomes."""
        args = self.args
        replies = validity.choose_replies(self.store, True, args.replies, args.seed)
        spec = read_model(player.spec)
        options = {"samples": args.samples, "rounds": args.rounds, "max_tokens": args.max_tokens}
        with Journal(self.out / "validity.jsonl", keep=lambda line: "missing" not in line) as results:
            lines: dict[str, validity.Line] = {line["place"]: line for line in results.lines}
            job = self.job("replies", results)
            async with open_scorer(
                metrics={"outcome": 1.0}, policy=read_model(player.policy), user=spec, budget=job.budget,
                user_options={"name": player.kind, **player.options}, **options,
            ) as scorer:  # fmt: skip
                await validity.simulate(job, scorer, replies, self.goal_of, lines)
        before = validity.choose_replies(self.store, False, 500, args.seed)
        trained = [{"words": validity.count_words(talk, at), "outcome": talk.outcome} for talk, at in before]
        measured = validity.measure([lines[talk.place] for talk, _ in replies], trained, good_from, args.seed)
        write_json(self.out / VALIDITY, measured)
        return measured

    def write_recipe(self, name: str, note: str, settings: Mapping[str, Any]) -> Path:
        """A recipe that extends one of the project's and uses files of this folder."""
        text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
        write_atomic(self.out / name, f"# {note}\n{text}".encode())
        return self.out / name

    def file(self, name: str) -> str:
        """The path of a file of rows."""
        return str(self.out / f"{name}.parquet")

    def write_fit(self, context: int) -> Path:
        """The recipe of the fitted model; a tiny model takes its vocabulary from the logs."""
        settings: dict[str, Any] = {"extends": "logs-fit", "run_dir": str(self.out / "fitted")}
        settings |= {"model": {"path": self.args.base, "max_context": context}, "train": {"steps": self.args.steps}}
        settings["task"] = {"train_file": self.file("fit_train")}
        if self.args.base == TINY:
            settings["model"] |= {"path": "", "tiny": {"context": context}}
            settings["task"]["tiny_words"] = 20000
            settings["train"] |= {"prompts_per_step": 96, "lr": 0.003, "save": {"every": 5}}
        return self.write_recipe("fit.yaml", "Learns users, outcomes and assistant of the logs.", settings)

    def write_training(self, player: Player | None, judged: bool, note: str) -> Path:
        """The recipe to train with: in the simulation, on outcomes alone if nobody can play the user, or by imitation.

        Without outcomes nothing says which replies are good, so a simulation has nothing to reward.
        """
        if player is None or not judged:
            method = "kto" if judged else "sft"
            settings: dict[str, Any] = {"extends": method, "name": f"logs-{method}", "model": {"path": self.args.base}}
            settings["train"] = {"data": self.file(f"{method}_train")}
            if Path(held_out := self.file(f"{method}_validation")).is_file():
                settings["eval"] = {"every": 20, "data": held_out}
        else:
            settings = {"extends": "logs", "model": {"path": player.policy}, "models": {"user": player.spec}}
            settings["task"] = {"train_file": self.file("rl_train"), "validation_file": self.file("rl_validation")}
            settings["episode"] = {"max_tokens": self.args.max_tokens}
            user = {"name": player.kind, "model": "user", **player.options}
            settings["futures"] = {"rounds": self.args.rounds, "user": user}
            if self.args.base == TINY:
                settings["train"] = {"lr": 0.0004}
        return self.write_recipe("recipe.yaml", note, settings)


def context_of(words: Sequence[int], most: int) -> tuple[int, list[str]]:
    """The context of a fitted model in tokens (about the longest conversation, bounded); notes if some exceed it."""
    longer = sum(length > most for length in words)
    note = (
        f"{longer:,} of {len(words):,} conversations have more than {most:,} words, but the fitted model sees only "
        "that many tokens (--context): their ends are not learned, and their late replies have no simulated future"
    )
    return min(max(SHORTEST, 3 * max(words) // 2), most), [note] if longer else []
