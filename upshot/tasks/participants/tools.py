"""Tool calls in OpenAI's format: the policy calls, the environment answers in tool messages, until no call is made.

A call comes as `message.tool_calls` where the backend parses them, or as `<tool_call>{"name": …, "arguments": {…}}
</tool_call>` in the text, as open models write it. An error in a call is reported to the policy, never raised.
"""

from __future__ import annotations

import asyncio
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import UserError, close_all, did_you_mean
from upshot.core.time_limit import limit_call
from upshot.sandbox.connection import connect
from upshot.tasks.participants.base import Observation, Participant
from upshot.tasks.participants.search import Corpus, load_corpus
from upshot.tasks.verifiers.arithmetic import evaluate
from upshot.tasks.verifiers.numbers import show_number

_CALL = re.compile(r"<tool_call>\s*(\{.{0,50000}?\})\s*</tool_call>", re.DOTALL)
CALLING = (
    'Call a tool with <tool_call>{"name": "<tool>", "arguments": {…}}</tool_call>; the next message answers it. Tools:'
)
"""What a system prompt says before the definitions of tools."""
MAX_CALLS = 8
"""Most calls of one turn that are answered; further ones are refused with a message."""
ACTS = "acts"
"""The key of a conversation's session under which its tool calls are recorded."""
MAX_ANSWER = 4000
"""Characters of a tool's answer; the rest is cut, visibly."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """One tool call; `fault` says why it cannot be answered."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    fault: str = ""


class Tool(ABC):
    """A tool that the policy may call. One object serves all conversations."""

    name = ""
    description = ""
    parameters: Mapping[str, str] = {}
    """Argument names and what they mean; all are texts and required."""
    schema: Mapping[str, Any] | None = None
    """The JSON schema of the arguments; None: it is made from `parameters`."""
    ends: bool = False
    """Whether a successful call ends the conversation."""

    @property
    def definition(self) -> dict[str, Any]:
        """The OpenAI tool definition."""
        properties = {key: {"type": "string", "description": text} for key, text in self.parameters.items()}
        schema = self.schema or {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}

    @abstractmethod
    async def call(self, arguments: Mapping[str, Any], conversation: Conversation) -> str:
        """The tool's answer; raises `ValueError` with a message for the policy if the arguments make no sense."""

    async def aclose(self) -> None:
        """Release what all conversations share."""


class Calculator(Tool):
    """Exact arithmetic with + - * / and parentheses; nothing whose result could be huge."""

    name = "calculator"
    description = "Evaluate an arithmetic expression of numbers, + - * / and parentheses."
    parameters: Mapping[str, str] = {"expression": "such as (3 + 4) * 12"}

    async def call(self, arguments: Mapping[str, Any], conversation: Conversation) -> str:
        """The value."""
        value = evaluate(str(arguments["expression"])[:500])
        if value is None:
            raise ValueError("not an expression of numbers, + - * / and parentheses")
        return show_number(value)


class Search(Tool):
    """Passages of a local corpus."""

    name = "search"
    description = "Search the corpus; returns the passages that fit best."
    parameters: Mapping[str, str] = {"query": "what to look for"}

    def __init__(self, corpus: Corpus, count: int = 3) -> None:
        self.corpus, self.count = corpus, count

    async def call(self, arguments: Mapping[str, Any], conversation: Conversation) -> str:
        """The passages, numbered."""
        passages = self.corpus.search(str(arguments["query"]), self.count)
        lines = [f"[{n}] {p.title + ': ' if p.title else ''}{p.text}" for n, p in enumerate(passages, 1)]
        return "\n".join(lines) or "nothing found"


class Python(Tool):
    """A Python program, in the sandbox."""

    name = "python"
    description = "Run a Python program and return what it prints."
    parameters: Mapping[str, str] = {"code": "the program"}

    def __init__(self, sandbox: Any = "local", cpu_seconds: float = 5.0) -> None:
        """sandbox: a CodeRunner, or where to connect to for the first program."""
        self._owned = isinstance(sandbox, str)
        self._sandbox = connect(sandbox) if isinstance(sandbox, str) else sandbox
        self.cpu_seconds = cpu_seconds

    async def call(self, arguments: Mapping[str, Any], conversation: Conversation) -> str:
        """Standard output, then the end of the error output."""
        from upshot.sandbox.limits import Limits

        result = await self._sandbox.run(str(arguments["code"]), limits=Limits(cpu_seconds=self.cpu_seconds))
        if str(result.outcome) == "sandbox_fault":
            raise RuntimeError(f"sandbox_fault: {result.detail}")  # the episode is missing; the policy did not cause it
        errors = f"\n[stderr] {result.stderr[-1000:]}" if result.stderr else ""
        ending = "" if str(result.outcome) == "passed" else f"\n[{result.outcome}]"
        return (result.stdout + errors + ending).strip() or "(no output)"

    async def aclose(self) -> None:
        """Stop the sandbox if it was started here."""
        if self._owned:
            await self._sandbox.aclose()


def make_tools(names: Sequence[str], corpus: str = "", sandbox: str = "local", results: int = 3) -> list[Tool]:
    """Tools by name: calculator, python, search."""
    known: dict[str, Callable[[], Tool]] = {
        "calculator": Calculator,
        "python": lambda: Python(sandbox),
        "search": lambda: Search(load_corpus(corpus), results),
    }
    for name in names:
        if name not in known:
            raise UserError(f"unknown tool '{name}'; {did_you_mean(name, known)}")
        if name == "search" and not corpus:
            raise UserError("the tool 'search' needs the option 'corpus' (a .jsonl or text file)")
    return [known[name]() for name in names]


class ToolEnvironment(Participant):
    """Answers all calls of a turn at once; done if a turn has none, or if a tool was called that `ends` it.

    Counts 'tool_calls' and 'tool_errors'. `role` is 'tool', or 'user' for chat templates without a tool role. The calls
    are also recorded in `session['acts']` of the conversation, with the owner of the tools (`by`).
    """

    def __init__(
        self, tools: Sequence[Tool], role: str = "tool", seconds: float | None = 30.0, by: str = "policy"
    ) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.role, self.seconds, self.by = role, seconds, by

    def definitions(self) -> list[dict[str, Any]]:
        """OpenAI definitions of the tools."""
        return [tool.definition for tool in self.tools.values()]

    def describe(self) -> str:
        """The tools and how to call them, for prompts whose template does not show them."""
        return "\n".join([CALLING, *(json.dumps(tool["function"]) for tool in self.definitions())])

    def answers_calls(self, row: Row | None = None) -> bool:
        """Always."""
        return True

    async def observe(self, conversation: Conversation) -> Observation:
        """The answers to the last turn's calls."""
        last = conversation.last("assistant")
        calls = calls_of(last) if last is not None else []
        if not calls:
            return Observation(done=True, reason="answered")
        acts = await self.act(calls, conversation)
        messages = tuple(self._message(call, act["answer"]) for call, act in zip(calls, acts, strict=True))
        return Observation(
            messages,
            done=any(act["good"] and self.tools[act["name"]].ends for act in acts),
            reason=self.by,
            metrics={"tool_calls": float(len(calls)), "tool_errors": float(sum(not act["good"] for act in acts))},
        )

    async def act(self, calls: Sequence[ToolRequest], conversation: Conversation) -> list[dict[str, Any]]:
        """Answer calls and record them in their order, each as {by, name, arguments, answer, good}."""
        answers = await asyncio.gather(*(self._answer(call, conversation) for call in calls[:MAX_CALLS]))
        answers += [("too many calls in one turn", False)] * len(calls[MAX_CALLS:])
        acts = [
            {"by": self.by, "name": call.name, "arguments": dict(call.arguments), "answer": text, "good": good}
            for call, (text, good) in zip(calls, answers, strict=True)
        ]
        conversation.session[ACTS] = [*conversation.session.get(ACTS, ()), *acts]
        return acts

    def _message(self, call: ToolRequest, text: str) -> Message:
        if self.role == "tool":
            return Message("tool", text, tool_call_id=call.id, name=call.name or None)
        return Message(self.role, f"[{call.name}] {text}")

    async def _answer(self, call: ToolRequest, conversation: Conversation) -> tuple[str, bool]:
        if call.fault:
            return f"error: {call.fault}", False
        tool = self.tools.get(call.name)
        if tool is None:
            return f"error: unknown tool '{call.name}'; {did_you_mean(call.name, self.tools)}", False
        if missing := [key for key in tool.parameters if key not in call.arguments]:
            return f"error: '{call.name}' needs the argument '{missing[0]}'", False
        try:
            text = await asyncio.wait_for(limit_call(tool, tool.call, call.arguments, conversation), self.seconds)
        except TimeoutError:
            return f"error: no answer within {self.seconds or 0:g} s", False
        except ValueError as error:
            return f"error: {error}", False
        return (text if len(text) <= MAX_ANSWER else f"{text[:MAX_ANSWER]} … (cut)"), True

    async def aclose(self) -> None:
        """Close the tools."""
        await close_all(self.tools.values())


def calls_of(message: Message) -> list[ToolRequest]:
    """The tool calls of an assistant message, parsed or in its text."""
    if message.tool_calls:
        calls = [(call.get("function") or {}, str(call.get("id") or "")) for call in message.tool_calls]
    else:
        calls = [(body, "") for body in _CALL.findall(message.content[-200_000:])]
    return [_request(call, identity or f"call_{number}") for number, (call, identity) in enumerate(calls)]


def _request(call: Any, identity: str) -> ToolRequest:
    """A call with `name` and `arguments`, each an object or its JSON; if it is invalid, `fault` says why."""
    function, fault = _object(call, "call is")
    name = str(function.get("name", ""))
    if fault:
        return ToolRequest(identity, name, {}, fault)
    arguments, fault = _object(function.get("arguments", function.get("parameters", {})), "arguments are")
    return ToolRequest(identity, name, arguments, fault)


def _object(value: Any, what: str) -> tuple[Mapping[str, Any], str]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            return {}, f"the {what} not JSON ({error})"
    return (value, "") if isinstance(value, Mapping) else ({}, f"the {what} not an object")
