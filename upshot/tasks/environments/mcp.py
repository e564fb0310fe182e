"""Tools of an MCP server: the policy may call the tools that the server lists.

Every episode has its own session (for a command: its own process) from its first call to its end, so that the server's
memory belongs to one conversation; `shared` is for servers that remember nothing. If a tool refuses a call, the reason
is shown to the policy. If a server does not start, goes away or breaks the protocol, the episode is missing.

Futures cannot call the tools of a session, because it cannot be copied; they need `shared`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from upshot.config.bounds import Positive, Words
from upshot.config.trust import check_trust
from upshot.core.conversation import Conversation, Tools
from upshot.core.errors import UserError, import_optional
from upshot.tasks.base import tasks
from upshot.tasks.participants.tools import Tool, ToolEnvironment
from upshot.tasks.tool_use import ToolUse

KEY = "mcp"
"""The key of a conversation's session; None under it: the session has ended."""
INVALID_PARAMS = -32602
"""JSON-RPC's code for invalid arguments."""


AT_ONCE = 16
"""Most concurrent calls in one session."""


class ServerGone(Exception):
    """An MCP server that does not answer, and the reason under which that is counted."""

    def __init__(self, why: str, reason: str = "connection") -> None:
        super().__init__(why)
        self.reason = reason


class McpSession:
    """One session with a server, open from `start` until it is closed or lost; it is never opened again."""

    def __init__(self, server: str, seconds: float) -> None:
        self.server, self.seconds = server, seconds
        self._client: Any = None
        self._over = asyncio.Event()
        self._opening = asyncio.Lock()
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._owner: asyncio.Task[None] | None = None

    def __deepcopy__(self, _: Mapping[int, Any]) -> McpSession:
        return self  # a copy of the conversation calls nothing: its episode is over

    async def start(self) -> None:
        """Connect, once; `ServerGone` if that fails."""
        async with self._opening:
            if self._owner is not None or self.is_over:
                return  # calls of one turn arrive together; after a failure, later ones get an error
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._owner = asyncio.create_task(self._own(ready))
            try:
                async with asyncio.timeout(self.seconds):
                    await ready
            except Exception as error:
                await self.aclose()
                raise ServerGone(f"the MCP server '{self.server}' did not start: {_words(error)}") from error

    @property
    def is_over(self) -> bool:
        """Whether it was closed, or lost."""
        return self._over.is_set()

    async def _own(self, ready: asyncio.Future[None]) -> None:
        """Hold the connection: the library requires that the task that opened it also closes it."""
        try:
            from mcp import Client, StdioServerParameters, stdio_client

            with open(os.devnull, "w") as nowhere:
                if self.server.startswith(("http://", "https://")):
                    place: Any = self.server
                else:
                    command, *arguments = shlex.split(self.server)
                    server = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
                    place = stdio_client(server, errlog=nowhere)
                async with Client(place) as self._client:
                    ready.set_result(None)
                    await self._over.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
        finally:
            self._client = None

    async def tools(self) -> list[Any]:
        """The tools that the server lists."""
        listed = await self._ask("its list of tools", lambda client: client.list_tools())
        return list(listed.tools)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A tool's answer as text; `ValueError` with its message if the tool reports an error."""
        result = await self._ask(f"tool '{name}'", lambda client: client.call_tool(name, dict(arguments)))
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise ValueError(text or "the tool failed")
        return text or "(no output)"

    async def _ask(self, what: str, ask: Any) -> Any:
        async with self._turn:  # the time limit of a call starts when it is sent, not while it waits
            if self._client is None or self.is_over:
                raise ServerGone(f"the MCP server '{self.server}' is gone ({what})")
            try:
                async with asyncio.timeout(self.seconds):
                    return await ask(self._client)
            except Exception as error:
                if getattr(error, "code", None) == INVALID_PARAMS:
                    raise ValueError(str(error)) from error  # the call is at fault, not the server
                slow = isinstance(error, TimeoutError)  # which says nothing about other calls in a shared session
                if not slow:
                    self._over.set()
                # It had answered before, so this call may be the cause; a lost connection is never caused by a call.
                reason = "timeout" if slow else "crashed"
                raise ServerGone(f"the MCP server '{self.server}', {what}: {_words(error)}", reason) from error

    async def aclose(self) -> None:
        """End the session."""
        self._over.set()
        if self._owner is not None:
            done, _ = await asyncio.wait([self._owner], timeout=self.seconds)
            if not done:
                self._owner.cancel()
            self._owner = None


def _words(error: BaseException) -> str:
    """An exception's type and message; for a group, those of its first exception."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".removesuffix(": ")


class McpTool(Tool):
    """One tool of a server."""

    def __init__(self, listed: Any, environment: McpEnvironment) -> None:
        self.environment = environment
        self.name = listed.name
        self.description = listed.description or ""
        self.schema = dict(listed.input_schema)
        self.parameters = dict.fromkeys(self.schema.get("required", ()), "")

    async def call(self, arguments: Mapping[str, Any], conversation: Conversation) -> str:
        """Ask the conversation's session."""
        session = await self.environment.session_of(conversation)
        return await session.call(self.name, arguments)


class McpEnvironment(ToolEnvironment):
    """Answers the calls of a turn with the server's tools."""

    def __init__(self, server: str, shared: bool, role: str, seconds: float) -> None:
        super().__init__((), role, None)  # each call has a limit of its own in its session
        self.forks = shared
        if not server.startswith(("http://", "https://")):
            check_trust(server, "MCP server", "task.server")
        self.server, self.shared, self.limit = server, shared, seconds
        self._all: McpSession | None = None
        self._starting = asyncio.Lock()

    def list_tools(self) -> None:
        """Ask the server for its tools, once; in a thread, because the caller may run on an event loop."""
        import_optional("mcp", "task 'mcp' needs the library: pip install -e '.[mcp]'")
        with ThreadPoolExecutor(1) as thread:
            try:
                listed = thread.submit(asyncio.run, self._list()).result()
            except (ServerGone, ValueError) as error:
                raise UserError(f"task.server: {error}") from error
        self.tools = {tool.name: McpTool(tool, self) for tool in listed}

    async def _list(self) -> list[Any]:
        async with contextlib.aclosing(McpSession(self.server, self.limit)) as session:
            await session.start()
            return await session.tools()

    async def session_of(self, conversation: Conversation) -> McpSession:
        """The conversation's session, opened by its first call; calls of one turn arrive together, and share it."""
        if self.shared:
            async with self._starting:
                if self._all is None or self._all.is_over:
                    self._all = McpSession(self.server, self.limit)
                    await self._all.start()
                return self._all
        if KEY not in conversation.session:
            conversation.session[KEY] = McpSession(self.server, self.limit)
        session: McpSession | None = conversation.session[KEY]
        if session is None:
            raise ServerGone(
                f"the session with the MCP server '{self.server}' ended with its episode, and a future cannot go on "
                "with it; set task.shared=true where the server remembers nothing, else futures.rounds=0"
            )
        await session.start()
        return session

    async def end(self, conversation: Conversation) -> None:
        """Close it."""
        session: McpSession | None = conversation.session.get(KEY)
        if session is not None:
            conversation.session[KEY] = None
            await session.aclose()

    async def aclose(self) -> None:
        """Close the shared one."""
        if self._all is not None:
            with contextlib.suppress(Exception):
                await self._all.aclose()
            self._all = None


@tasks.register("mcp")
class McpTask(ToolUse):
    """Rows of any verifier; the policy may call the tools of an MCP server before it answers."""

    def __init__(
        self,
        server: Words,
        shared: bool = False,
        seconds: Positive = 30.0,
        verifier: str | None = None,
        verifier_options: Mapping[str, Any] | None = None,
        role: Literal["tool", "user"] = "tool",
        describe: bool = False,
        **rows: Any,
    ) -> None:
        """Make the task.

        server: a command that speaks MCP on its standard input and output, or the address of one that speaks HTTP.
        shared: one session for all conversations, where the server remembers nothing. seconds: of one call.
        The others are as for task 'tools'.
        """
        if fixed := {"tools", "corpus", "results", "sandbox"} & rows.keys():
            raise UserError(f"task 'mcp' does not take '{min(fixed)}': the server sets its tools; use task 'tools'")
        super().__init__(tools=(), verifier=verifier, verifier_options=verifier_options, role=role, **rows)
        self._environment: McpEnvironment = McpEnvironment(server, shared, role, seconds)
        if describe:
            self.describe_tools()

    def environment(self) -> McpEnvironment:
        """The server's tools; it is asked for them once."""
        if not self._environment.tools:
            self._environment.list_tools()
        return self._environment

    def tools(self) -> Tools:
        """What the server lists."""
        return self.environment().definitions()
