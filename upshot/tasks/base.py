"""What a task supplies. Adding one is one file with `@tasks.register("name")`, or `my_pkg.mod:Task` in the recipe."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from upshot.config.registry import Registry
from upshot.core.conversation import Conversation, Message, Row, Tools
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score, naming_errors
from upshot.core.time_limit import limit_call_now
from upshot.tasks.environments.agent import AgentFunction
from upshot.tasks.participants.base import Participant
from upshot.tasks.participants.tools import ToolEnvironment
from upshot.tasks.verifiers.base import Claim

log = logging.getLogger(__name__)

C = TypeVar("C", bound=Callable[..., Any])
SPLITS = ("train", "validation", "test")


class Task(ABC):
    """Rows, and how their conversations are answered and verified.

    The constructor's keyword arguments are the task's options in the recipe (`task: {name: gsm8k, train_file: …}`).
    Split names are 'train', 'validation' and 'test'; splits never share a goal.
    """

    name: str = ""
    """Its name in messages; registering sets it."""

    @abstractmethod
    def rows(self, split: str) -> Sequence[Row]:
        """The rows of a split, in a stable order."""

    def check_split(self, split: str) -> None:
        """Refuse a split that a task with generated rows does not have."""
        if split not in SPLITS:
            raise UserError(f"task '{self.name}' has no split '{split}'; known: {', '.join(SPLITS)}")

    def sources(self) -> list[str]:
        """The files, folders and Hub names that the rows are read from."""
        return []

    def part(self, row: Row) -> Task:
        """The task that a row belongs to: this one, except in a mix of several."""
        return self

    def environment(self) -> Participant | None:
        """Who answers between the policy turns of an episode; None: the episode is one reply."""
        return None

    def agent(self) -> AgentFunction | None:
        """Who plays the episodes of this task by calling the policy; None: policy and environment take turns."""
        return None

    def user(self) -> Participant | None:
        """The simulated user of this task if the recipe names none; None if the task has none."""
        return None

    def claim(self, conversation: Conversation) -> Claim | None:
        """What is to be verified, as plain data that any reward manager can check; None: `verify` decides."""
        return None

    async def verify(self, conversation: Conversation) -> Score:
        """Whether the finished conversation meets the row's reference; what the metric `verifier` reports."""
        return Score.missing(Reason.NOT_SCORED, f"task '{self.name}' has no verifier")

    def format_error(self, text: str) -> str:
        """What is wrong with the form of a policy turn, in a word or two; empty if nothing is wrong."""
        return ""

    def format_faults(self, conversation: Conversation) -> list[str]:
        """`format_error` of each turn that the assistant took after the opening; '' if the form is right."""
        return [self.format_error(reply) for reply in list_replies(conversation)]

    def tools(self) -> Tools:
        """OpenAI definitions of the tools that the environment answers; empty when there are none."""
        return []

    def user_tools(self) -> ToolEnvironment | None:
        """What the simulated user can do itself (`tasks/participants/dual.py`); None when it can only talk."""
        return None

    def dialogues(self, split: str) -> Sequence[tuple[Message, ...]]:
        """Whole conversations to imitate, for supervised training; empty when the task has none."""
        return []

    def answer_text(self, row: Row) -> str:
        """The right answer of a row as a reply would say it, for models that score it instead of sampling one."""
        return str(row.reference)

    def similar_key(self, row: Row) -> str:
        """Rows with the same key ask similar questions (futures `similar-question`, `similar_by: key`)."""
        return " ".join(f"{name}={group}" for name, group in groups_of(self, row).items())

    def vocabulary(self) -> Sequence[str]:
        """Words of the task's own small language, for a new tiny model; empty if it uses a natural language."""
        return []

    def groups(self, row: Row) -> Mapping[str, str]:
        """Groups by which a row's results are reported as well: {'difficulty': 'hard'}."""
        return {}

    def caveat(self) -> str:
        """What a reader of results on this task must know, in a sentence; '' if there is nothing."""
        return ""

    async def aclose(self) -> None:
        """Release sandboxes, sessions, worker processes."""


def groups_of(task: Task, row: Row) -> dict[str, str]:
    """A row's groups as its task names them, within the time limit; none, with a warning, if that fails."""
    try:
        return {str(name): str(value) for name, value in limit_call_now(task, task.groups, row).items()}
    except UserError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        log.warning("task '%s' cannot name the groups of row '%s': %s", task.name, row.id, why)
        return {}


def list_replies(conversation: Conversation) -> list[str]:
    """What the assistant has said after the row's opening."""
    played = conversation.turns[len(conversation.row.messages) :]
    return [turn.message.content for turn in played if turn.message.role == "assistant"]


def last_reply(conversation: Conversation) -> str:
    """What the assistant said last; '' where it has said nothing."""
    last = conversation.last("assistant")
    return last.content if last is not None else ""


class TaskRegistry(Registry[Task]):
    """Tasks by name; a task that does not name itself is called by the first name that it is registered by."""

    def register(self, name: str, *aliases: str) -> Callable[[C], C]:
        """Decorator: make a task known by name and aliases."""
        add = super().register(name, *aliases)

        def add_named(task: Any) -> Any:
            task.name = vars(task).get("name", name)
            return add(task)

        return add_named

    def create(self, name: str, *options: Any, **context: Any) -> Task:
        """See `Registry`. The rows and dialogues of a task of the user's own are checked."""
        task = super().create(name, *options, **context)
        if ":" in name:
            task.rows = partial(_read, task.rows, "rows", name)  # type: ignore[method-assign]
            task.dialogues = partial(_read, task.dialogues, "dialogues", name)  # type: ignore[method-assign]
        return task


def _read(read: Callable[[str], Iterable[Any] | None], what: str, name: str, split: str) -> list[Any]:
    """The rows or dialogues by a task of the user's own; refused if they do not consist of messages with text."""
    with naming_errors(f"{what}('{split}') of task '{name}'"):
        listed = list(read(split) or ())
    for one in listed:
        messages = one.messages if isinstance(one, Row) else () if what == "rows" else one
        wrong = [one] if not isinstance(messages, tuple | list) else [m for m in messages if not _is_message(m)]
        if wrong or (what == "rows" and not isinstance(one, Row)):
            shown, kind = (one, "Row objects with Message") if what == "rows" else (wrong[0], "tuples of Message")
            where = f"{what}('{split}') of '{name}'"
            raise UserError(f"{where} should be {kind} objects, not {shown!r:.120}; the content of a message is text")
    return listed


def _is_message(value: Any) -> bool:
    return isinstance(value, Message) and isinstance(value.content, str)


tasks = TaskRegistry("task", "upshot.tasks", "upshot.tasks.dual", "upshot.tasks.environments", base=Task)
"""Tasks that a recipe can name in `task.name`."""
