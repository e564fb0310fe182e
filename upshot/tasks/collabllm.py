"""The CollabLLM tasks: math-hard, medium, bigcodebench, abg-coqa, and `collabllm` for a file of your own.

A task reads, by what the file holds: RL parquet (the history so far is the opening), a published multi-turn set (each
distinct history once), or a single-turn set (nobody has spoken; the simulated user opens). Sft parquet gives
`dialogues`. A file without splits of its own is split by goal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from upshot.core.conversation import Message, Row, messages_from
from upshot.core.errors import UserError
from upshot.tasks.base import Task, tasks
from upshot.tasks.collabllm_prompts import system_prompt
from upshot.tasks.datasets.collabllm_goals import held_out, plain
from upshot.tasks.datasets.collabllm_records import (
    code_row,
    coqa_row,
    facts,
    is_candidate,
    is_dialogue,
    is_rl,
    math_row,
    medium_row,
    plain_row,
    rl_row,
)
from upshot.tasks.datasets.tables import Record, read_tables


@tasks.register("collabllm")
class CollabTask(Task):
    """Conversations towards a hidden goal."""

    name = "collabllm"
    description = "The user works with an assistant on a task of theirs."
    """What the simulated user is told the conversation is about."""
    metrics: Mapping[str, float] = {"accuracy": 1.0, "interactivity": 1.0, "token_amount": -5e-4}
    """Weights of the multiturn-aware reward; the first one is the task metric of the paper's table."""
    options: Mapping[str, Mapping[str, Any]] = {}
    """Options of those metrics."""
    user_opens = True
    """Whether the simulated user says the first message of a single-turn row."""
    max_messages = 14
    """Most messages of a whole conversation, the system prompt not counted."""
    table_group: str | None = None
    """By which of its groups the table shows the task metric, too."""
    hub = ""
    """Hugging Face name of the single-turn set; '' when it has none."""
    hub_splits: tuple[str, ...] = ()
    parse: Callable[[Record, str], Row | None] = staticmethod(plain_row)

    def __init__(
        self,
        file: str | None = None,
        train_file: str | None = None,
        validation_file: str | None = None,
        test_file: str | None = None,
        held_out: float = 0.1,
        system: str = "none",
        limit: int | None = None,
        split_seed: int = 0,
        tiny_words: int = 0,
    ) -> None:
        """Make the task.

        file: a file, folder or Hub name with all splits; train_file, validation_file, test_file: one of each.
        Without any, the task's own Hub set is loaded.
        held_out: share of the goals that test and validation each get of a `file` without splits of its own.
        system: system prompt put before the opening of single-turn rows: plain, proactive, none or a text file.
        limit: at most so many rows a split.
        tiny_words: how many of the data's commonest words a tiny model of the recipe's own knows, for offline trials;
        0: the task speaks a real language, and the recipe must name a model.
        """
        named = {"train": train_file, "validation": validation_file, "test": test_file}
        self._named = {split: source for split, source in named.items() if source}
        self._file = file or (None if self._named else self.hub)
        if not self._file and not self._named:
            raise UserError(
                f"task '{self.name}' needs the option 'file' (a .jsonl, .parquet or .json file, or a folder)"
            )
        self.held_out = held_out
        self.system = system_prompt(system)
        self.limit = limit
        self.split_seed = split_seed
        self.tiny_words = tiny_words
        self._tables: dict[str, list[Record]] | None = None
        self._rows: dict[str, list[Row]] | None = None

    def rows(self, split: str) -> Sequence[Row]:
        """The rows of a split; splits share no goal."""
        by_split = self.all_rows()
        found = by_split.get(split, [])
        if not found:
            sizes = ", ".join(f"{name} {len(rows)}" for name, rows in by_split.items()) or "none"
            raise UserError(f"task '{self.name}' has no rows in split '{split}' (rows: {sizes})")
        return found[: self.limit]

    def all_rows(self) -> Mapping[str, Sequence[Row]]:
        """The rows of every split that has any."""
        if self._rows is None:
            tables = {name: self._parse_all(records) for name, records in self._load().items()}
            self._rows = separate(tables, self.held_out if self._file else 0.0, self.split_seed)
        return self._rows

    def dialogues(self, split: str) -> Sequence[tuple[Message, ...]]:
        """The whole conversations of sft parquet: rows with `messages`, or with a `prompt` that is one."""
        said: list[Any] = [record.get("messages") or record.get("prompt") for record in self._load().get(split, [])]
        return [messages_from(messages) for messages in said if is_dialogue(messages)][: self.limit]

    def vocabulary(self) -> Sequence[str]:
        """The commonest words of prompts, replies, goals and references, when `tiny_words` asks for any."""
        if not self.tiny_words:
            return []
        words: Counter[str] = Counter()
        for split, rows in self.all_rows().items():
            said = [message for row in rows for message in row.messages]
            said += [message for dialogue in self.dialogues(split) for message in dialogue]
            hidden = [str(text) for row in rows for text in (row.goal, row.reference) if text]
            for text in (*(message.content for message in said), *hidden):
                words.update(text.split())
        return [word for word, _ in sorted(words.items(), key=lambda item: (-item[1], item[0]))][: self.tiny_words]

    def groups(self, row: Row) -> Mapping[str, str]:
        """Subject or turn, where the row says so."""
        named = {"subject": row.meta.get("subject"), "turn": row.meta.get("turn_id")}
        return {key: str(value) for key, value in named.items() if value}

    def _load(self) -> dict[str, list[Record]]:
        if self._tables is None:
            tables = read_tables(self._file, self.hub_splits) if self._file else {}
            for split, source in self._named.items():
                tables[split] = [record for table in read_tables(source).values() for record in table]
            self._tables = tables
        return self._tables

    def _parse_all(self, records: Sequence[Record]) -> list[Row]:
        rows = (self._parse(record) for record in records)
        return list({row.id: row for row in rows if row is not None}.values())

    def _parse(self, record: Record) -> Row | None:
        if is_rl(record):
            return rl_row(record, self.name)
        if is_candidate(record):
            return rl_row(_as_rl(record), self.name)
        row = type(self).parse(record, self.name)
        if row is None:
            return None
        meta = {"task_desc": self.description, **row.meta}
        start = (Message("system", self.system),) if self.system else ()
        return Row(row.id, (*start, *row.messages), row.goal, row.reference, row.source, meta)


def separate(tables: Mapping[str, Sequence[Row]], share: float, seed: int = 0) -> dict[str, list[Row]]:
    """Rows by split without a shared goal: a goal of test or validation leaves train.

    A source that is all train has `share` of its goals held out for each of test and validation.
    """
    found: dict[str, list[Row]] = {}
    taken: set[str] = set()
    for split in ("test", "validation", "train"):
        found[split] = [row for row in tables.get(split, ()) if goal_key(row) not in taken]
        taken |= {goal_key(row) for row in found[split]}
    if not found["test"] and not found["validation"]:
        for number, split in enumerate(("test", "validation")):
            goals = held_out(map(goal_key, found["train"]), share, seed + number)
            found[split] = [row for row in found["train"] if goal_key(row) in goals]
            found["train"] = [row for row in found["train"] if goal_key(row) not in goals]
    return {split: rows for split, rows in found.items() if rows}


def goal_key(row: Row) -> str:
    """By what rows are held together in a split: the goal, else the opening."""
    return plain(str(row.goal)) if row.goal else plain("\n".join(m.content for m in row.messages))


def _as_rl(record: Record) -> Record:
    """A published candidate as an RL row: its history is the opening, the reply is left out."""
    extra = {"conv_id": record.get("conv_id"), "turn_id": record.get("turn_id")}
    extra |= {
        "single_turn_prompt": record["single_turn_prompt"],
        "single_turn_metadata": facts(record.get("single_turn_metadata")),
    }
    return {"prompt": record["prompt"], "ground_truth": record.get("single_turn_completion"), "extra_info": extra}


@tasks.register("math-hard")
class MathHard(CollabTask):
    """Level 5 problems of MATH, which the user has and does not spell out."""

    name = "math-hard"
    description = "The user wants to solve a mathematics problem and get to its final answer with an assistant's help."
    hub = "lighteval/MATH-Hard"
    parse = staticmethod(math_row)


@tasks.register("medium")
class Medium(CollabTask):
    """Articles that the user has in mind and wants to have written."""

    name = "medium"
    description = "The user wants a document written with an assistant's help: a blog article on a topic of theirs."
    metrics: Mapping[str, float] = {"document->bleu": 1.0, "interactivity": 1.0, "token_amount": -1e-4}
    hub = "fabiochiu/medium-articles"
    parse = staticmethod(medium_row)


@tasks.register("bigcodebench")
class BigCodeBench(CollabTask):
    """Functions that the user wants written; unit tests decide."""

    name = "bigcodebench"
    description = "The user wants a piece of Python code written with an assistant's help, and it has to work."
    metrics: Mapping[str, float] = {"code->pass_rate": 1.0, "interactivity": 1.0, "token_amount": -5e-4}
    hub = "bigcode/bigcodebench"
    hub_splits = ("v0.1.4", "v0.1.3", "v0.1.2", "v0.1.1", "v0.1.0_hf", "train")
    parse = staticmethod(code_row)


@tasks.register("abg-coqa")
class AbgCoqa(CollabTask):
    """Questions about a story: ambiguous ones should be asked back, clear ones answered."""

    name = "abg-coqa"
    description = "The user asks a question about a story."
    metrics: Mapping[str, float] = {"action_accuracy": 1.0, "token_amount": -5e-4}
    user_opens = False
    max_messages = 2
    table_group = "question"
    parse = staticmethod(coqa_row)

    def groups(self, row: Row) -> Mapping[str, str]:
        """Whether the question is ambiguous."""
        return {"question": "ambiguous" if row.meta.get("ambiguous") else "unambiguous"}
