"""Dual control: policy and user have separate tools for one state that belongs to the conversation.

The state is made from the row, is kept in `conversation.session` (so forks copy it), and can be made again from the
tool calls so far (`session['acts']`); a finished run is scored again in this way. A call that is refused (`ValueError`)
changes nothing; any other exception of a tool makes the future missing. The user's calls are not shown to the policy:
they are in the acts, and in the note of the user's turn.

Turn-taking is not decided here: a `DualControl` is an ordinary participant of the one loop that takes turns.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upshot.core.conversation import Conversation, Row
from upshot.core.score import Reason
from upshot.core.time_limit import limit_call, limit_call_now
from upshot.tasks.participants.base import Observation, Participant
from upshot.tasks.participants.tools import ACTS, Tool, ToolEnvironment, ToolRequest, calls_of

STATE = "state"
"""The key of a conversation's session under which the shared state lives."""
MAX_ACTS = 16
"""Tool calls that a user may make before it has to say something."""


class RuleBroken(Exception):
    """The simulated user broke a rule; nothing can be learned from the rest of the conversation."""

    reason = Reason.USER_RULES


class StateTool(Tool):
    """A plain function of the state and of texts, `def refund(shop, order): …`; its docstring describes it."""

    def __init__(self, function: Callable[..., str], state: SharedState, ends: bool = False) -> None:
        self.name = function.__name__
        self.description = (inspect.getdoc(function) or "").partition("\n")[0]
        self.parameters = {name: name for name in list(inspect.signature(function).parameters)[1:]}
        self.function, self.state, self.ends = function, state, ends

    async def call(self, arguments: Mapping[str, Any], conversation: Conversation) -> str:
        """The function's answer; its changes apply from then on, or not at all if it raises."""
        changed = copy.deepcopy(self.state.of(conversation))
        answer = self.apply(changed, arguments)
        conversation.session[STATE] = changed
        return answer

    def apply(self, state: Any, arguments: Mapping[str, Any]) -> str:
        """Call the function on a state, which it changes in place."""
        values = {name: str(arguments[name]) for name in self.parameters}
        return limit_call_now(self.function, self.function, state, **values)


class SharedState:
    """One state with two sets of tools: `policy` and `user`, plain functions of it."""

    def __init__(
        self,
        begin: Callable[[Row], Any],
        policy: Sequence[Callable[..., str]],
        user: Sequence[Callable[..., str]] = (),
        ends: Sequence[Callable[..., str]] = (),
        role: str = "tool",
    ) -> None:
        """begin: the state of a new conversation with a row. ends: the functions whose call ends the conversation.

        role: of the answers to the policy; 'user' for chat templates without a tool role.
        """
        self.begin = begin
        self.policy = ToolEnvironment([StateTool(one, self, one in ends) for one in policy], role)
        self.user = ToolEnvironment([StateTool(one, self, one in ends) for one in user], by="user")

    def of(self, conversation: Conversation) -> Any:
        """The conversation's state: new if nothing was done yet, made again if only the acts are known."""
        if STATE not in conversation.session:
            state = copy.deepcopy(self.begin(conversation.row))
            for act in conversation.session.get(ACTS, ()):
                tool = (self.user if act["by"] == "user" else self.policy).tools.get(act["name"])
                if act["good"] and isinstance(tool, StateTool):
                    tool.apply(state, act["arguments"])
            conversation.session[STATE] = state
        return conversation.session[STATE]


@dataclass(eq=False)
class DualControl(Participant):
    """Answers the policy's tool calls by its tools, and everything else by the simulated user."""

    user: Participant
    tools: Participant

    def answers_calls(self, row: Row | None = None) -> bool:
        """If its tools do."""
        return self.tools.answers_calls(row)

    async def start(self, conversation: Conversation) -> None:
        """Start as the user does."""
        await limit_call(self.user, self.user.start, conversation)

    async def observe(self, conversation: Conversation) -> Observation:
        """The tools' answers if the policy called any, else the user's words."""
        last = conversation.last("assistant")
        calls = last is not None and last == conversation.turns[-1].message and calls_of(last)
        tools = calls and self.tools.answers_calls(conversation.row)
        who = self.tools if tools else self.user
        return await limit_call(who, who.observe, conversation)

    async def end(self, conversation: Conversation) -> None:
        """End the user's session, and what the tools opened for the conversation when they were called."""
        try:
            await limit_call(self.user, self.user.end, conversation)
        finally:
            if self.tools.answers_calls(conversation.row):
                await limit_call(self.tools, self.tools.end, conversation)

    async def aclose(self) -> None:
        """Close the user; the tools are closed by their task."""
        await self.user.aclose()

    def stats(self) -> dict[str, float]:
        """The user's."""
        return self.user.stats()

    def state(self) -> dict[str, Any]:
        """The user's."""
        return self.user.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Hand it to the user."""
        self.user.restore(state)


def with_tools(user: Participant, environment: Participant | None) -> Participant:
    """A user together with the task's tools, which answer the policy's calls; the user alone if the task has none."""
    return DualControl(user, environment) if environment is not None and environment.answers_calls() else user


async def act_as_user(
    tools: ToolEnvironment, calls: Sequence[ToolRequest], conversation: Conversation, done: int = 0
) -> list[dict[str, Any]]:
    """Make the calls of a user that has `done` this many in its turn; `RuleBroken` if it may not make them."""
    foreign = next((call.name for call in calls if call.name not in tools.tools), None)
    if foreign is not None:
        own_tools = ", ".join(tools.tools) or "it has none"
        raise RuleBroken(f"the user called '{foreign}', which is not one of its tools ({own_tools})")
    if done + len(calls) > MAX_ACTS:
        raise RuleBroken(f"the user made more than {MAX_ACTS} tool calls in one turn and said nothing")
    return await tools.act(calls, conversation)
