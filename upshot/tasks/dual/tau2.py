"""τ²-bench's own domains, unchanged: its tasks, policies, tools of both sides, user instructions and evaluators.

Needs its repository (`pip install git+https://github.com/sierra-research/tau2-bench`); the package of that name on PyPI
is a different one. Turn-taking is ours: its orchestrator, its agents, its greeting by the agent and its voice are not
used. The user is `futures.user: {name: plain, …}` over any model: a row's goal is the whole prompt of its user
simulator.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from upshot.config.bounds import Words
from upshot.core.conversation import Conversation, Message, Row, Tools
from upshot.core.errors import UserError, did_you_mean
from upshot.core.score import Score
from upshot.tasks.base import Task, tasks
from upshot.tasks.participants.base import Participant
from upshot.tasks.participants.dual import STATE
from upshot.tasks.participants.tools import ACTS, Tool, ToolEnvironment, calls_of

ENDED = {"user": "user_stop", "policy": "agent_stop"}
"""Why it ended, in the words of its evaluator; all else is a conversation that was cut, worth 0 there."""


def import_tau2(module: str) -> Any:
    """A module of τ²-bench; `UserError` where it is not installed."""
    try:
        return importlib.import_module(f"tau2.{module}")
    except ImportError as error:
        raise UserError(
            f"task 'tau2' needs τ²-bench, but '{error.name}' is not installed: pip install "
            "git+https://github.com/sierra-research/tau2-bench (the package 'tau2' on PyPI is a different one)"
        ) from error


class DomainTool(Tool):
    """A tool of a domain, called on the conversation's own copy of its environment."""

    def __init__(self, tool: Any, task: Tau2Task, by: str) -> None:
        self.name = tool.name
        self._definition = tool.openai_schema
        self.parameters = dict.fromkeys(self._definition["function"]["parameters"].get("required", ()), "")
        self.task, self.by = task, by

    @property
    def definition(self) -> dict[str, Any]:
        """The domain's own definition."""
        return dict(self._definition)

    async def call(self, arguments: Mapping[str, Any], conversation: Conversation) -> str:
        """The environment's answer; a refusal is a `ValueError`."""
        call = {"id": "call", "name": self.name, "arguments": dict(arguments), "requestor": self.by}
        made = import_tau2("data_model.message").ToolCall.model_validate(call)
        answer = self.task.world(conversation).get_response(made)
        if answer.error:
            raise ValueError(str(answer.content).removeprefix("Error: "))
        return str(answer.content)


@tasks.register("tau2")
class Tau2Task(Task):
    """A domain of τ²-bench."""

    def __init__(
        self, domain: Words = "telecom", role: Literal["tool", "user"] = "tool", describe: bool = False
    ) -> None:
        """Make the task.

        domain: mock, airline, retail, telecom … as τ²-bench registers them.
        role: role of the tools' answers; 'user' for chat templates without a tool role.
        describe: put the tools and how to call them into the system prompt, for templates that do not show them.
        """
        self.registry = import_tau2("registry").registry
        if domain not in self.registry.get_domains():
            raise UserError(f"τ²-bench has no domain '{domain}'; {did_you_mean(domain, self.registry.get_domains())}")
        self.domain, self.describe = domain, describe
        agent_tools, user_tools = self._pristine.tools, self._pristine.user_tools
        of_agent = agent_tools.get_tools().values()
        of_user = user_tools.get_tools().values() if user_tools is not None else ()
        self._tools = ToolEnvironment([DomainTool(tool, self, "assistant") for tool in of_agent], role)
        self._user_tools = ToolEnvironment([DomainTool(tool, self, "user") for tool in of_user], by="user")

    @cached_property
    def _pristine(self) -> Any:
        try:
            return self.registry.get_env_constructor(self.domain)()
        except FileNotFoundError as error:
            raise UserError(
                f"τ²-bench's data of domain '{self.domain}' is missing ({error.filename}); set TAU2_DATA_DIR to the "
                "folder 'data' of its repository"
            ) from error

    @cached_property
    def _tasks(self) -> dict[str, Any]:
        return {task.id: task for task in self.registry.get_tasks_loader(self.domain)(None)}

    def rows(self, split: str) -> Sequence[Row]:
        """Its tasks of that split: none if there is no such split, but all tasks for train if there is no train."""
        splits: Mapping[str, Sequence[str]] = (self.registry.get_task_splits_loader(self.domain) or dict)()
        known = splits.get(split, () if split != "train" or "train" in splits else tuple(self._tasks))
        return [self._row(name) for name in self._tasks if name in known]

    def environment(self) -> Participant:
        """The agent's tools."""
        return self._tools

    def user_tools(self) -> ToolEnvironment | None:
        """The user's, where the domain has any."""
        return self._user_tools if self._user_tools.tools else None

    def tools(self) -> Tools:
        """Definitions of the agent's tools."""
        return self._tools.definitions()

    def world(self, conversation: Conversation) -> Any:
        """The conversation's own environment, set up as its task says."""
        if STATE not in conversation.session:
            environment = copy.deepcopy(self._pristine)
            task = self._tasks[conversation.row.reference]
            if (initial := task.initial_state) is not None:
                environment.set_state(initial.initialization_data, initial.initialization_actions, _history(task))
            conversation.session[STATE] = environment
        return conversation.session[STATE]

    async def verify(self, conversation: Conversation) -> Score:
        """The reward of its own evaluators, over everything that either side said and did."""
        simulation, evaluator = import_tau2("data_model.simulation"), import_tau2("evaluator.evaluator")
        run = simulation.SimulationRun(
            id=conversation.key,
            task_id=conversation.row.reference,
            start_time="",
            end_time="",
            duration=0.0,
            termination_reason=ENDED.get(conversation.ended or "", "max_steps"),
            messages=self.trajectory(conversation),
        )
        task, kind = self._tasks[conversation.row.reference], evaluator.EvaluationType.ALL
        outcome = evaluator.evaluate_simulation(run, task, kind, False, self.domain, strict_replay=False)
        parts = {str(name.value): value for name, value in (outcome.reward_breakdown or {}).items()}
        return Score(float(outcome.reward), detail={"parts": parts})

    def trajectory(self, conversation: Conversation) -> list[Any]:
        """What was said and done, in the classes of its evaluators: first the acts in their order, then the words."""
        theirs = import_tau2("data_model.message")
        classes = {"assistant": theirs.AssistantMessage, "user": theirs.UserMessage}
        out = list(_history(self._tasks[conversation.row.reference]))
        for number, act in enumerate(conversation.session.get(ACTS, ())):
            by = "user" if act["by"] == "user" else "assistant"
            call = {"id": f"call_{number}", "name": act["name"], "arguments": act["arguments"], "requestor": by}
            out.append(classes[by](role=by, content=None, tool_calls=[theirs.ToolCall.model_validate(call)]))
            answer = {"id": f"call_{number}", "role": "tool", "content": act["answer"], "requestor": by}
            out.append(theirs.ToolMessage.model_validate({**answer, "error": not act["good"]}))
        for message in conversation.messages[len(conversation.row.messages) :]:
            if message.role in classes and message.content and not calls_of(message):
                out.append(classes[message.role](role=message.role, content=message.content))
        return out

    def _row(self, name: str) -> Row:
        task, agent = self._tasks[name], import_tau2("agent.llm_agent")
        simulator = import_tau2("user.user_simulator").UserSimulator(
            llm="", instructions=str(task.user_scenario), tools=[*self._user_tools.tools] or None
        )
        texts = {"domain_policy": self._pristine.get_policy(), "agent_instruction": agent.AGENT_INSTRUCTION}
        policy = agent.SYSTEM_PROMPT.format(**texts)
        if self.describe:
            policy += f"\n\n{self._tools.describe()}"
        messages = [Message(m.role, m.content) for m in _history(task) if m.role in ("user", "assistant") and m.content]
        return Row(name, (Message("system", policy), *messages), simulator.system_prompt, name, self.name)


def _history(task: Any) -> Sequence[Any]:
    """What was said before a task begins."""
    return (task.initial_state.message_history if task.initial_state is not None else None) or []
