"""`upshot chat MODEL|RUN|URL`: reads lines, streams replies and prints results; `chat.py` has the commands."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from upshot.api.reward import open_scorer
from upshot.config.load import load_recipe
from upshot.core.conversation import Row, Turn
from upshot.core.errors import UserError, did_you_mean, user_error_in
from upshot.core.files import check_writable
from upshot.core.thought import GrowingThought
from upshot.models.base import ModelCallError
from upshot.models.connect import connect
from upshot.offline.arguments import SCRIPT, read_metrics, read_model
from upshot.offline.play.chat import Chat
from upshot.offline.play.opened import StandingPolicy, held_out, open_recipe, recipe_of_run
from upshot.offline.play.trees import clean, group_tree, tell_scores
from upshot.rollout.futures.talk import Talk
from upshot.tasks.base import Task
from upshot.tasks.participants.base import users

HELP = """\
/user [N]     the simulated user talks instead of you, N rounds (1)
/fork [N]     N replies (3) to the last words, each with its futures and its reward
/take K       continue with reply K of the fork
/score        every metric of the conversation as it stands
/think        show thoughts, or hide them again
/goal TEXT    what the simulated user wants    /reference TEXT   the right answer
/save [FILE]  append the conversation to a JSONL file (chat.jsonl)
/new          begin another conversation       /quit   leave (Ctrl-D)
"""
RunNow = Callable[[Coroutine[Any, Any, Any]], Any]


def run(args: argparse.Namespace) -> int:
    """Start all models, then read lines until the end."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            chat = runner.run(stack.enter_async_context(open_chat(args)))
            model = chat.context.policy.model
            assert isinstance(model, StandingPolicy)
            Terminal(chat, model, runner.run, args.think).read()
        finally:
            runner.run(stack.aclose())
    return 0


def _goals(task: Task) -> list[Row]:
    """Rows with goals for a simulated user; none if the data is not on this machine, since a chat does not need any."""
    problem = ""
    for split in (None, "train"):
        try:
            return held_out(task, split, 1000)
        except UserError as error:
            problem = str(error)
    print(f"no rows to talk about: {problem}", file=sys.stderr)
    return []


@asynccontextmanager
async def open_chat(args: argparse.Namespace) -> AsyncIterator[Chat]:
    """The model, and everybody else that the run, the recipe or the options name."""
    if args.recipe or recipe_of_run(args.model):
        for option in ("user", "judge", "metrics"):
            if getattr(args, option):
                raise UserError(f"--{option}: the recipe sets it; override models.{option}=… or reward.metrics=…")
        recipe = load_recipe(args.recipe or args.model, args.overrides).recipe
        recipe = recipe.model_copy(update={"episode": recipe.episode.model_copy(update=_sampling(args))})
        async with open_recipe(recipe, _spec(args)) as opened:
            services = opened.services
            yield Chat(opened.context, services.metrics, services.user, _goals(opened.task), args.system, args.seed)
        return
    if args.overrides:
        raise UserError(f"'{args.overrides[0]}' overrides a recipe, but there is none; give --recipe, or a run folder")
    async with connect(_spec(args), role="policy") as model:
        policy = StandingPolicy(model)
        user = users.create("scripted", {}, "--user") if args.user == SCRIPT else args.user and read_model(args.user)
        usual = {"token_amount": 0.0} if model.tokenizer is not None else {}
        metrics = read_metrics([args.metrics]) if args.metrics else usual
        who = {"policy": policy, "user": user or policy, "judge": args.judge and read_model(args.judge)}
        length = {"samples": args.samples, "rounds": 0 if user is None else args.rounds}
        async with open_scorer(metrics=metrics, **who, **length, **_sampling(args)) as scorer:
            context, futures = scorer.context, scorer.context.futures
            assert isinstance(futures, Talk)
            if model.tokenizer is not None:
                from upshot.models.rendering import Renderer

                context.policy.renderer = Renderer(model.tokenizer)
            context = replace(context, user=futures.user)
            yield Chat(context, futures.metrics, futures.user, (), args.system, args.seed)


def _spec(args: argparse.Namespace) -> Any:
    """The model that speaks; if a run folder stands for one of its checkpoints, print which."""
    name = args.model
    if args.checkpoint:
        from upshot.run.export import find_checkpoint
        from upshot.run.folder import RunFolder

        checkpoint = find_checkpoint(RunFolder.open(Path(name)), args.checkpoint)
        print(f"{name}: its checkpoint {checkpoint.path.name}")
        return f"local:{checkpoint.path}"
    return read_model(name)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The model's options on the command line."""
    return {name: value for name in ("max_tokens", "temperature") if (value := getattr(args, name)) is not None}


class Terminal:
    """Reads lines and prints the results."""

    def __init__(self, chat: Chat, policy: StandingPolicy, run_now: RunNow, think: bool) -> None:
        from rich.console import Console

        self.chat, self.policy, self.run_now, self.think = chat, policy, run_now, think
        self.console = Console(markup=False, highlight=False)

    def read(self) -> None:
        """Read lines until Ctrl-D, /quit or the end of a pipe."""
        with suppress(ImportError):
            import readline  # line editing and history, where the platform has it

            assert readline
        self.console.print("talk to it; /help lists the commands, Ctrl-D leaves", style="dim")
        while True:
            try:
                line = input("you> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line in ("/quit", "/q", "/exit"):
                return
            if line:
                self.obey(line)

    def obey(self, line: str) -> None:
        """Handle one line: words for the model, or a command; an error is printed, and the chat continues."""
        before = self.chat.conversation.turns
        try:
            if line.startswith("/"):
                self._command(*line[1:].partition(" ")[::2])
            else:
                self.chat.say(line)
                self._speak()
        except KeyboardInterrupt:
            self.chat.conversation.turns = before
            self.console.print("\n(broken off)", style="dim")
        except (UserError, ModelCallError, ExceptionGroup, OSError) as error:
            self.chat.conversation.turns = before
            self.console.print(clean(str(user_error_in(error) or error)), style="yellow")

    def _command(self, name: str, rest: str) -> None:
        commands: dict[str, Callable[[str], None]] = {
            "user": self._user, "fork": self._fork, "take": self._take, "score": self._score, "think": self._think,
            "save": self._save, "goal": partial(self._set, "goal"), "reference": partial(self._set, "reference"),
            "new": lambda _: self.chat.restart(), "help": lambda _: self.console.print(HELP, end=""),
        }  # fmt: skip
        if name not in commands:
            raise UserError(f"unknown command '/{name}'; {did_you_mean(name, [*commands, 'quit'])}")
        commands[name](rest.strip())

    def _speak(self) -> None:
        """Stream the reply; show thoughts only if they are switched on."""
        growing = GrowingThought(opened=False)

        def show(thought: str, answer: str) -> None:
            self._put(thought if self.think else "", "dim italic")
            self._put(answer)

        self.policy.hear = lambda text: show(*growing.feed(clean(text)))
        self.console.print("model> ", style="bold cyan", end="")
        try:
            turn: Turn = self.run_now(self.chat.reply())
        finally:
            self.policy.hear = None
        show(*growing.finish())
        kept = turn.sample
        tokens, finish = (len(kept.ids), kept.finish) if kept else (turn.note.get("tokens"), turn.note.get("finish"))
        notes = [f"{tokens} tokens"] if tokens else []
        notes += ["cut at the limit"] if finish == "length" else []
        notes += ["a thought (/think)"] if self.chat.thought() and not self.think else []
        self.console.print()
        if notes:
            self.console.print(f"  {', '.join(notes)}", style="dim")

    def _put(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, end="", soft_wrap=True)

    def _user(self, rest: str) -> None:
        for _ in range(_number(rest, 1)):
            if self.chat.conversation.ended is not None:
                raise UserError(f"the conversation has ended ({self.chat.conversation.ended}); /new starts another")
            for message in self._telling_goal(self.chat.hear_user()):
                self.console.print(f"user> {clean(message.content)}", style="green")
            if self.chat.conversation.ended is not None:
                self.console.print(f"(the user has left: {self.chat.conversation.ended})", style="dim")
                return
            self._speak()

    def _telling_goal(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await a result; if the conversation got a goal meanwhile, show it first."""
        goal = self.chat.conversation.row.goal
        try:
            return self.run_now(work)
        finally:
            row = self.chat.conversation.row
            if row.goal is not None and row.goal != goal:
                self.console.print(f"goal (the model does not see it): {clean(str(row.goal))}", style="dim")

    def _fork(self, rest: str) -> None:
        replies = self._telling_goal(self.chat.fork(_number(rest, 3)))
        self.console.print(group_tree(replies, "what comes of each reply", self.think))
        self.console.print("continue with one of them: /take K", style="dim")

    def _take(self, rest: str) -> None:
        self.console.print(f"model> {clean(self.chat.take(_number(rest, 0)).message.content)}", style="cyan")

    def _score(self, rest: str) -> None:
        self.console.print(tell_scores(self._telling_goal(self.chat.score())))

    def _think(self, rest: str) -> None:
        self.think = not self.think
        self.console.print(f"thoughts are {'shown' if self.think else 'hidden'}", style="dim")
        if self.think and (thought := self.chat.thought()):
            self._put(clean(thought) + "\n", "dim italic")

    def _save(self, rest: str) -> None:
        path = Path(rest or "chat.jsonl")
        check_writable(path, "FILE: /save FILE")
        self.chat.save(path)
        self.console.print(f"saved to {path}", style="dim")

    def _set(self, name: str, rest: str) -> None:
        if not rest:
            raise UserError(f"/{name} needs a text: /{name} TEXT")
        self.chat.set_fact(name, rest)


def _number(text: str, otherwise: int) -> int:
    if not text:
        return otherwise
    if not text.isdecimal() or not 0 < int(text) <= 64:
        raise UserError(f"'{text}' is not a number from 1 to 64")
    return int(text)
