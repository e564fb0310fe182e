"""The CollabLLM tasks: math-hard, medium, bigcodebench, abg-coqa, and `collabllm` for a file of your own.

What a task reads depends on the file: RL parquet (the history so far is the opening), a published multi-turn set (each
distinct history once), or a single-turn set (no messages yet; the simulated user opens). Sft parquet gives
`dialogues`. A file without splits is split by goal.

The single-turn sets have columns of their own: MATH (problem, solution, level, type), Medium articles (title, text),
BigCodeBench (instruct_prompt, canonical_solution, test …), Abg-CoQA (story, target_turn, ambiguity …). Any other file
has `prompt` and `completion` (or `goal` and `reference`).
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from upshot.config.bounds import Whole
from upshot.core.conversation import Message, Row
from upshot.core.errors import UserError, did_you_mean
from upshot.core.files import read_text
from upshot.tasks.base import tasks
from upshot.tasks.datasets.files import Record
from upshot.tasks.datasets.messages import facts, is_dialogue, messages_of
from upshot.tasks.datasets.records import GOAL, REFERENCE, first
from upshot.tasks.datasets.splits import fingerprint
from upshot.tasks.tables import TableTask

PLAIN = "You are a helpful assistant. Work with the user on their task and answer their messages."
"""The system prompt of the base and the trained rows, and of prepared data."""

PROACTIVE = (Path(__file__).parent / "proactive.txt").read_text("utf-8").strip()
"""The system prompt of the proactive row, and of a share of the candidates when data is built."""

HARD = "Level 5"
LONGEST_ARTICLE = 384
"""Words that make about 512 tokens."""
PUBLISHED_SEED = 42
"""Seed of the original's splits. Published conversations are about goals of its training split: others are held out."""
SYSTEMS: dict[str, str] = {"plain": PLAIN, "proactive": PROACTIVE, "none": ""}


def system_prompt(name: str) -> str:
    """The prompt behind 'plain', 'proactive', 'none' or a text file; empty means no system message."""
    if name in SYSTEMS:
        return SYSTEMS[name]
    path = Path(name).expanduser()
    if path.is_file():
        return read_text(path, "system prompt").strip()
    raise UserError(f"unknown system prompt '{name}'; {did_you_mean(name, SYSTEMS)} (or the path of a text file)")


@tasks.register("collabllm")
class CollabTask(TableTask):
    """Conversations towards a hidden goal."""

    description = "The user works with an assistant on a task of theirs."
    """What the conversation is about, in words for the simulated user."""
    metrics: Mapping[str, float] = {"accuracy": 1.0, "interactivity": 1.0, "token_amount": -5e-4}
    """Weights of the multiturn-aware reward; the first one is the task metric of the paper's table."""
    options: Mapping[str, Mapping[str, Any]] = {}
    """Options of those metrics."""
    user_opens = True
    """Whether the simulated user says the first message of a single-turn row."""
    max_messages = 14
    """Most messages of a whole conversation, the system prompt not counted."""
    table_group: str | None = None
    """The group by which the table also reports the task metric."""
    column = ""
    """The column that identifies a record of the task's own single-turn set."""

    def __init__(self, system: str = "none", tiny_words: Whole = 0, **table: Any) -> None:
        """Make the task.

        system: system prompt before the opening of single-turn rows: plain, proactive, none or a text file.
        tiny_words: vocabulary of a new tiny model, for offline trials: this many of the data's most frequent words;
        0: the recipe must name a model.
        The other options say where rows come from: see `TableTask`.
        """
        super().__init__(**table)
        self.check_source()
        if not self._file:  # with a file for each split, nothing is held out
            self.held_out = 0.0
        self.system = system_prompt(system)
        self.tiny_words = tiny_words

    def parse_table(self, split: str, records: Sequence[Record]) -> list[Row]:
        """The rows of the records that can be played; each history of a goal once."""
        return list({row.id: row for row in self._rows(split, records)}.values())

    def _rows(self, split: str, records: Sequence[Record]) -> Iterator[Row]:
        rows = (self._row(record, f"task '{self.name}', {split}, row {n}") for n, record in enumerate(records, 1))
        return (row for row in rows if row is not None)

    def _row(self, record: Record, where: str) -> Row | None:
        if isinstance(record.get("prompt"), list) and ("extra_info" in record or "single_turn_prompt" in record):
            return history_row(record, self.name, where)
        row = self.parse(record) if self.column and self.column in record else plain_row(record, self.name)
        if row is None:
            return None
        start = (Message("system", self.system),) if self.system else ()
        return replace(row, messages=(*start, *row.messages), meta={"task_desc": self.description, **row.meta})

    def parse(self, record: Record) -> Row | None:
        """A record of the task's own single-turn set as a row; None where it is not wanted."""
        raise NotImplementedError

    def dialogues(self, split: str) -> Sequence[tuple[Message, ...]]:
        """The whole conversations of sft parquet: rows with `messages`, or with a `prompt` that is one."""
        columns: list[Any] = [record.get("messages") or record.get("prompt") for record in self._tables.get(split, [])]
        whole = [(number, messages) for number, messages in enumerate(columns, 1) if is_dialogue(messages)]
        return [messages_of(talk, where=f"task '{self.name}', {split}, row {n}") for n, talk in whole[: self.limit]]

    def vocabulary(self) -> Sequence[str]:
        """The commonest words of prompts, replies, goals and references, when `tiny_words` asks for any."""
        if not self.tiny_words:
            return []
        words: Counter[str] = Counter()
        for split, rows in self.all_rows().items():
            messages = [message for row in rows for message in row.messages]
            messages += [message for dialogue in self.dialogues(split) for message in dialogue]
            hidden = [str(text) for row in rows for text in (row.goal, row.reference) if text]
            for text in (*(message.content for message in messages), *hidden):
                words.update(text.split())
        return [word for word, _ in sorted(words.items(), key=lambda item: (-item[1], item[0]))][: self.tiny_words]

    def groups(self, row: Row) -> Mapping[str, str]:
        """Subject or turn, where the row says so."""
        named = {"subject": row.meta.get("subject"), "turn": row.meta.get("turn_id")}
        return {key: str(value) for key, value in named.items() if value}


def plain_row(record: Record, source: str) -> Row | None:
    """A row of any prompt/completion file; None when it has no prompt, or is one of sft or dpo parquet."""
    if "chosen" in record or "messages" in record or is_dialogue(record.get("prompt")):
        return None  # prepared for dpo or sft: nothing to play from
    goal, reference = (*GOAL, "prompt"), (*REFERENCE, "completion")
    text = _text_of(first(record, goal))
    if not text:
        return None
    meta = {key: value for key, value in record.items() if key not in (*goal, *reference) and value is not None}
    return _goal_row(source, text, _text_of(first(record, reference)), meta)


def history_row(record: Record, source: str, where: str) -> Row:
    """A row whose opening is the history so far: of RL parquet, or of a published multi-turn set (one reply of many).

    RL parquet keeps goal and facts in `extra_info`, a published set beside the prompt. `where` names it in errors.
    """
    extra = facts(record["extra_info"]) if "extra_info" in record else record
    interaction = facts(extra.get("interaction_kwargs"))
    goal = interaction.get("single_turn_prompt") or extra.get("single_turn_prompt") or ""
    meta = facts(extra.get("single_turn_metadata"))
    if interaction.get("task_desc"):
        meta["task_desc"] = interaction["task_desc"]
    meta |= {key: extra[key] for key in ("conv_id", "turn_id") if extra.get(key) is not None}
    messages = messages_of(record["prompt"], where=where)
    name = f"{source}/{fingerprint(goal)}/{fingerprint(json.dumps([m.to_dict() for m in messages]))}"
    if "extra_info" not in record:
        return Row(name, messages, goal, record.get("single_turn_completion"), source, meta)
    reference = record.get("ground_truth") or facts(record.get("reward_model")).get("ground_truth")
    return Row(name, messages, goal, reference, record.get("data_source") or source, meta)


def _goal_row(source: str, goal: str, reference: str, meta: Mapping[str, Any]) -> Row:
    known = {key: value for key, value in meta.items() if value not in (None, "")}
    return Row(f"{source}/{fingerprint(goal)}", (), goal, reference, source, known)


def _text_of(value: Any) -> str:
    """Text of a prompt or completion given as a string or as messages."""
    if isinstance(value, list):
        return "\n\n".join(str(m.get("content") or "") for m in value if isinstance(m, Mapping)).strip()
    return value.strip() if isinstance(value, str) else ""


@tasks.register("math-hard")
class MathHard(CollabTask):
    """Level 5 problems of MATH; the user knows the problem but does not state all of it."""

    description = "The user wants to solve a mathematics problem and get to its final answer with an assistant's help."
    hub = "lighteval/MATH-Hard"
    other_hub = "DigitalLearningGmbH/MATH-lighteval"  # all levels, of which `parse` takes the hardest
    column = "problem"

    def parse(self, record: Record) -> Row | None:
        """A problem of level 5; None for the easier ones."""
        level = record.get("level", HARD)
        if level != HARD:
            return None
        meta = {"level": level, "subject": record.get("type", "")}
        return _goal_row(self.name, str(record["problem"]), str(record.get("solution", "")), meta)


@tasks.register("medium")
class Medium(CollabTask):
    """Articles that the user has in mind and asks the policy to write."""

    description = "The user wants a document written with an assistant's help: a blog article on a topic of theirs."
    metrics: Mapping[str, float] = {"document->bleu": 1.0, "interactivity": 1.0, "token_amount": -1e-4}
    hub = "Kamaljp/medium_articles"
    other_hub = "fabiochiu/medium-articles"
    column = "text"

    def _read(self, source: str) -> dict[str, list[Record]]:
        """The records of a source; of the whole Hub set what the paper takes of it, split as there."""
        tables = super()._read(source)
        return newest(tables["train"]) if source == self.hub else tables

    def parse(self, record: Record) -> Row | None:
        """An article with a text, which is goal and reference in one."""
        title, text = str(record.get("title") or "").strip(), str(record["text"]).strip()
        if not text:
            return None
        goal = f"Get this article written{f', titled “{title}”' if title else ''}:\n\n{text}"
        return _goal_row(self.name, goal, text, {"title": title, "tags": record.get("tags")})


def newest(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The newest articles, 2 % to train on and 0.5 % to test with, of which those with at most 512 tokens are kept."""
    dated = sorted((record for record in records if record.get("timestamp")), key=lambda r: str(r["timestamp"]))
    tested, trained = int(len(dated) * 0.005), int(len(dated) * 0.02)
    recent = dated[len(dated) - tested - trained :]
    random.Random(PUBLISHED_SEED).shuffle(recent)
    parts = {"test": recent[:tested], "train": recent[tested:]}
    return {split: [r for r in rows if len(str(r["text"]).split()) <= LONGEST_ARTICLE] for split, rows in parts.items()}


@tasks.register("bigcodebench")
class BigCodeBench(CollabTask):
    """Functions that the user wants written; unit tests decide."""

    description = "The user wants a piece of Python code written with an assistant's help, and it has to work."
    metrics: Mapping[str, float] = {"code->pass_rate": 1.0, "interactivity": 1.0, "token_amount": -5e-4}
    hub = "bigcode/bigcodebench"
    hub_splits = ("v0.1.4", "v0.1.3", "v0.1.2", "v0.1.1", "v0.1.0_hf", "train")
    column = "instruct_prompt"

    def _read(self, source: str) -> dict[str, list[Record]]:
        """The records of a source; a fifth of the whole Hub set is for testing, the same as in the original."""
        tables = super()._read(source)
        if source == self.hub:
            records = list(tables["train"])
            random.Random(PUBLISHED_SEED).shuffle(records)
            trained = int(len(records) * 0.8)
            tables = {"train": records[:trained], "test": records[trained:]}
        return tables

    def parse(self, record: Record) -> Row:
        """A problem with its unit tests."""
        solution = f"{record.get('code_prompt') or ''}{record.get('canonical_solution') or ''}"
        kept = ("task_id", "test", "entry_point", "libs", "code_prompt")
        meta: dict[str, Any] = {key: record[key] for key in kept if key in record}
        # What extracted code must look like for the tests to find it: the name they call, and how it begins.
        name, start = str(meta.get("entry_point") or ""), str(meta.get("code_prompt") or "").rstrip()
        form = [f"Runnable Python, no code fences. The function the tests call is `{name}`."] if name else []
        form += [f"It begins with:\n{start}"] if start else []
        meta["extraction_requirement"] = record.get("extraction_requirement") or "\n".join(form)
        return _goal_row(self.name, str(record["instruct_prompt"]), solution, meta)


@tasks.register("abg-coqa")
class AbgCoqa(CollabTask):
    """Questions about a story: a reply should ask back if they are ambiguous, and answer if they are clear."""

    description = "The user asks a question about a story."
    metrics: Mapping[str, float] = {"action_accuracy": 1.0, "token_amount": -5e-4}
    user_opens = False
    max_messages = 2
    table_group = "question"
    column = "target_turn"

    def parse(self, record: Record) -> Row:
        """A question about a story; the user has nothing to hide and says it at once."""
        target = record["target_turn"]
        history = "\n".join(f"Q: {turn['question']}\nA: {turn['answer']}" for turn in record.get("history_turns") or ())
        # Nothing here says whether to answer or to ask back.
        parts = ["I have a question about this story.", str(record["story"]).strip(), history]
        text = "\n\n".join([*filter(None, parts), f"My question: {target['question']}"])
        ambiguous = record.get("ambiguity") == "ambiguous"
        meta = {"ambiguous": ambiguous, "clarification": record.get("clarification_turn")}
        row = _goal_row(self.name, text, str(target.get("answer") or ""), meta)
        return replace(row, messages=(Message("user", text),))

    def groups(self, row: Row) -> Mapping[str, str]:
        """Whether the question is ambiguous."""
        return {"question": "ambiguous" if row.meta.get("ambiguous") else "unambiguous"}
