"""Questions answered with tools: `tools` with any verifier, `search-qa` with a local corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from upshot.config.bounds import Count, Words
from upshot.core.conversation import Tools
from upshot.core.errors import UserError
from upshot.tasks.base import tasks
from upshot.tasks.participants.tools import ToolEnvironment, make_tools
from upshot.tasks.verified import VerifiedTask
from upshot.tasks.verifiers.base import verifiers
from upshot.tasks.verifiers.judged import with_rubric_read


@tasks.register("tools")
class ToolUse(VerifiedTask):
    """Rows of any verifier; the policy may call tools before it answers."""

    verifier = "gsm8k"

    def __init__(
        self,
        tools: Sequence[str] = ("calculator",),
        verifier: str | None = None,
        verifier_options: Mapping[str, Any] | None = None,
        corpus: str = "",
        results: Count = 3,
        sandbox: str = "local",
        role: Literal["tool", "user"] = "tool",
        describe: bool = False,
        **rows: Any,
    ) -> None:
        """Make the task.

        tools: calculator, python (in `sandbox`), search (over `corpus`, `results` passages a query).
        verifier: how answers are checked, with `verifier_options`.
        role: role of the tools' answers; 'user' for chat templates without a tool role.
        describe: put the tools and how to call them into the system prompt, for templates that do not show them.
        """
        super().__init__(**rows)
        self.verifier = verifier or type(self).verifier
        self.verifier_options = with_rubric_read(verifier_options or {})
        verifiers.check(self.verifier, self.verifier_options, "task.verifier", judge=None, sandbox=None, models=None)
        self._environment = ToolEnvironment(make_tools(tools, corpus, sandbox, results), role)
        if describe:
            self.describe_tools()

    def describe_tools(self) -> None:
        """Put the tools and how to call them into the system prompt."""
        self.system = f"{self.system}\n\n{self.environment().describe()}".strip()

    def environment(self) -> ToolEnvironment:
        """The tools."""
        return self._environment

    def tools(self) -> Tools:
        """Their definitions."""
        return self._environment.definitions()

    async def aclose(self) -> None:
        """Close the tools."""
        await self._environment.aclose()


@tasks.register("search-qa")
class SearchQa(ToolUse):
    """Questions about a local corpus, answered after searching it."""

    verifier = "search-qa"
    instructions = "Search before you answer. End with your answer between <answer> and </answer>."

    def __init__(self, corpus: Words, mode: Literal["exact", "contains", "f1"] = "exact", **rows: Any) -> None:
        """corpus: JSONL rows {title, text}, or a text file of paragraphs. mode: exact, contains or f1."""
        if fixed := {"tools", "verifier_options"} & rows.keys():
            raise UserError(f"task 'search-qa' sets '{min(fixed)}' itself; use task 'tools' to choose it")
        super().__init__(tools=("search",), verifier_options={"mode": mode}, corpus=corpus, **rows)
