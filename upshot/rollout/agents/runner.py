"""Plays episodes by somebody else's program: a command started for each, or a function called for each.

A program reads what it is to do as JSON from its standard input (`AgentEpisode.to_dict`), finds the policy where
clients look (OPENAI_BASE_URL, OPENAI_API_KEY), and has a session of its own, of which nothing is left when it ends. An
async function runs on the event loop, a plain one in a thread; one that hangs in a thread cannot be ended, only left.

It does not isolate: a program has the rights of the run. What outlives a killed run finds nobody at its address.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import re
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from typing import Any

from upshot.config.recipe import AgentConfig
from upshot.config.registry import import_thing
from upshot.config.trust import check_trust
from upshot.core.conversation import Conversation
from upshot.core.errors import UserError
from upshot.core.process import end_session
from upshot.core.score import Reason, Score
from upshot.rollout.agents.recording import CallRecording, PlayedPath
from upshot.rollout.episode import Policy
from upshot.tasks.environments.agent import AgentEpisode, AgentFunction

HOST = "127.0.0.1"
TAIL = 2000
"""Characters of a program's last words that are looked at."""


class AgentFailure(Exception):
    """An episode that came to nothing, and the reason it is counted under."""

    def __init__(self, reason: Reason, why: str) -> None:
        super().__init__(why)
        self.reason = reason.value


class AgentRunner:
    """Starts a program for every episode, and answers its calls at an address of its own."""

    def __init__(self, config: AgentConfig, tokenizer: Any, function: AgentFunction | None = None) -> None:
        """function: what to call instead of `config.program`."""
        self.config, self.tokenizer = config, tokenizer
        self.function = function or find_function(config.program)
        self.words = [] if self.function is not None else find_command(config.program)
        if function is None:
            check_trust(config.program, "agent", "episode.agent")
        self._gate = asyncio.Semaphore(config.at_once)
        self._open = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._server: Any = None
        self._root = ""

    async def start(self) -> None:
        """Start the server, if it is not running: done for the first episode, as runs without one need no server."""
        from upshot.core.http_listener import listen, serve_beside
        from upshot.serving.openai.conversations import ConversationServer

        async with self._starting:
            if self._server is not None:
                return
            server = ConversationServer("policy", self.tokenizer)
            listener = self._open.enter_context(closing(listen(HOST, 0)))
            self._root = f"http://{HOST}:{listener.getsockname()[1]}"
            await self._open.enter_async_context(serve_beside(server.app, listener))
            self._server = server

    async def aclose(self) -> None:
        """Listen no more."""
        await self._open.aclose()
        self._server = None

    async def play(self, conversation: Conversation, policy: Policy, others: list[PlayedPath]) -> None:
        """Have one episode played: the conversation becomes the last call's, `others` gets what else there is.

        `AgentFailure` where the program crashes, takes too long or never asks the policy; what was said stays, to be
        read, and has no reward.
        """
        from upshot.serving.openai.conversations import addresses

        await self.start()
        async with self._gate:
            recording = CallRecording(conversation, policy, self._server.dialect, self.config.calls)
            served = self._server.open(recording)
            address = dict(addresses(served, self._root))
            episode = AgentEpisode(conversation.row, model=self._server.name, **address)
            try:
                async with asyncio.timeout(self.config.seconds):
                    worth = await self._run(episode)
            except TimeoutError as error:
                raise _failure(Reason.TIMEOUT, f"it took more than {self.config.seconds:g} s", served.faults) from error
            except AgentFailure as error:
                raise _failure(Reason(error.reason), str(error), served.faults) from error
            except Exception as error:
                if not served.faults:
                    raise
                first = next(iter(str(error).splitlines()), "")[:100]
                raise _failure(Reason.ERROR, f"{type(error).__name__}: {first}", served.faults) from error
            finally:
                self._server.close(served)
                _write_down(conversation, recording.paths(), others)
            if not recording.replies:
                raise _failure(Reason.NOTHING_SAID, "it never called the policy", served.faults)
            conversation.score = served.reward or worth

    async def _run(self, episode: AgentEpisode) -> Score | None:
        """What the program's end is worth; None: nothing by itself."""
        if self.function is None:
            return await self._run_command(episode)
        worth = await call_function(self.function, episode)
        return None if worth is None else Score.of(worth, "the agent")

    async def _run_command(self, episode: AgentEpisode) -> Score | None:
        keys = {"OPENAI_BASE_URL": episode.base_url, "OPENAI_API_BASE": episode.base_url}
        keys |= {"OPENAI_API_KEY": episode.api_key, "OPENAI_MODEL": episode.model}
        # Files and no pipes: what a program starts and leaves behind may hold them open as long as it likes.
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as log:
            stdin.write(json.dumps(episode.to_dict(), default=str).encode())
            stdin.seek(0)
            process = await asyncio.create_subprocess_exec(
                *self.words, stdin=stdin, stdout=log, stderr=log, env={**os.environ, **keys}, start_new_session=True
            )
            try:
                status = await process.wait()
            finally:
                end_session(process.pid)
                await process.wait()
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
            tail = log.read().decode(errors="replace").strip()
        if status < 0 or (status and self.config.outcome == "task"):
            how = f"it was ended by signal {-status}" if status < 0 else f"it ended with status {status}"
            raise AgentFailure(Reason.CRASHED, f"{how}: {' '.join(tail.splitlines()[-1:])}".removesuffix(": "))
        return Score(float(status == 0)) if self.config.outcome == "exit" else None


def _failure(reason: Reason, what: str, faults: Sequence[str]) -> AgentFailure:
    """The same, with what the program was refused, which may be why."""
    refused = f" (it was refused: {faults[-1]})" if faults else ""
    return AgentFailure(reason, f"agent: {what}{refused}")


def _write_down(conversation: Conversation, paths: Sequence[PlayedPath], others: list[PlayedPath]) -> None:
    """Make a conversation the first path's; its row opens as the program did."""
    if not paths:
        return
    turns = paths[0].conversation.turns
    first = next(at for at, turn in enumerate(turns) if turn.sample is not None)
    conversation.row = replace(conversation.row, messages=tuple(turn.message for turn in turns[:first]))
    conversation.turns = turns
    conversation.ended = "agent"
    others += paths[1:]


def find_function(program: str) -> AgentFunction | None:
    """The function that a program's name stands for; None for a command."""
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", program) is None:
        return None
    thing = import_thing(program, "agent", "episode.agent")
    if not callable(thing):
        raise UserError(f"agent '{program}' in episode.agent is not a function but {type(thing).__name__}")
    function: AgentFunction = thing
    return function


def find_command(program: str) -> list[str]:
    """The words of a command, whose first must be there."""
    try:
        words = shlex.split(program)
    except ValueError as error:
        raise UserError(f"episode.agent '{program}' is not a command: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise UserError(
            f"episode.agent: there is no program '{words[0] if words else program}'; give a command or "
            "'my_pkg.module:function'"
        )
    return words


async def call_function(function: AgentFunction, episode: AgentEpisode) -> Any:
    """What a function returns: on the event loop where it is async, else in a thread that nobody waits for at exit."""
    try:
        if inspect.iscoroutinefunction(function):
            return await function(episode)
        return await _in_thread(functools.partial(function, episode))
    except SystemExit as error:
        raise AgentFailure(Reason.CRASHED, f"it ended with status {error.code}") from error


async def _in_thread(work: Callable[[], Any]) -> Any:
    """The result of work in a thread of its own: unlike an executor's, nobody waits for it when the program ends."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()  # whoever gives up waiting leaves the thread to its work

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="upshot-agent", daemon=True).start()
    return await asyncio.wrap_future(done)
