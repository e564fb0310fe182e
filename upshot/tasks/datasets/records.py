"""One record of a file → a row to play, replies to score, a dialogue or a pair to learn from. Pure functions.

A record is recognised by its columns, never by its file's name:
- verl: `data_source`, `prompt` (messages), `reward_model.ground_truth`, `extra_info` (prepared by this project: with
  the row's other columns as JSON text under `metadata`)
- TRL and open-instruct: `prompt` or `messages` (text or messages), `ground_truth`/`answer`/`solution`, `dataset`
- plain: `question`/`problem`/`query`/`input` and `answer`/`solution`/`target`
- conversations: `prompt` and `completion`, or whole `messages`; `single_turn_…` columns say goal and reference

The tuples below list all names that a column may have. Candidates of a multi-turn set, whose rules are stricter, are in
`candidates.py`; sets with special columns (MATH, BigCodeBench …) are read by their tasks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from upshot.core.conversation import Conversation, Message, Row, Turn, derive_seed
from upshot.core.errors import UserError, near
from upshot.core.thought import split_thought
from upshot.tasks.datasets.files import how_to_prepare, read_table
from upshot.tasks.datasets.messages import describe, facts, is_dialogue, is_empty, messages_of
from upshot.tasks.verifiers.base import decode_json
from upshot.tasks.verifiers.routes import route

PROMPT = ("prompt", "raw_prompt")
"""What the policy replies to: a text or messages. The first name of such a tuple that a record has counts."""
WHOLE = ("messages", "conversation")
"""A whole conversation."""
QUESTION = ("question", "problem", "query", "input", "instruction", "text")
REPLY = ("completion", "reply", "completions", "replies")
GOAL = ("goal", "single_turn_prompt")
"""What the simulated user wants."""
REFERENCE = ("reference", "single_turn_completion")
"""What a reply to a goal is compared with."""
ANSWER = (
    *("ground_truth", "answer", "solution", "target", "label", "reference", "completion", "answers", "output"),
    "answerKey",
)
"""What a verifier compares with."""
NAME = ("id", "row_id", "task_id", "unique_id")
PAIR = ("prompt", "chosen", "rejected")
MARKED = ("prompt", "completion", "label")
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""The values that mark a reply as good or bad; in CSV files they are text."""
PAIR_SCORES = ("score_chosen", "score_rejected")
TRUTH = ("actual_ground_truth", "ground_truth")
"""The right answer in `reward_model`; if both are there, the second is what was rewarded: a wrong letter in a hint."""
ALIASES = {"hint": ("hint", "non_answer_hint_str"), "stub": ("stub", "import_prompt")}
"""Names in `extra_info` or `reward_model` for values that verifiers need."""
METADATA = "metadata"
"""The key in `extra_info` under which prepared rows keep their other columns, as JSON text."""
ROUNDING = 1e-9
"""The tolerance with which 0.7 − 0.2 is a gap of 0.5."""


def first(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first of the columns that is not empty; None if all are. In tables of pandas, empty is NaN."""
    return next((record[name] for name in names if not is_empty(record.get(name))), None)


def columns_of(record: Mapping[str, Any]) -> str:
    """The columns of a record that are not empty, for messages."""
    return ", ".join(name for name in record if not is_empty(record[name])) or "(none)"


def row_of(record: Mapping[str, Any], source: str, instructions: str = "", system: str = "") -> Row:
    """A record as a row; `instructions` are appended to a bare question, not to a prompt that has its own.

    `source` is the verifier if the record names none.
    """
    messages, bare = _opening(record)
    if bare and instructions:
        last = messages[-1]
        messages = (*messages[:-1], Message(last.role, f"{last.content}\n\n{instructions}"))
    if system and messages[0].role != "system":
        messages = (Message("system", system), *messages)
    extra = extra_of(record)
    extra.setdefault("question", next((m.content for m in reversed(messages) if m.role == "user"), ""))
    name = next((str(extra[key]) for key in NAME if extra.get(key)), None)
    return Row(name or opening_id(messages), messages, None, reference_of(record), route(record, source), extra)


def extra_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Everything in a record besides opening and truth: its own columns, `extra_info`, the rest of `reward_model`."""
    extra = facts(record.get("extra_info"))
    extra |= facts(extra.pop(METADATA, None))
    verdict = {key: value for key, value in facts(record.get("reward_model")).items() if key not in (*TRUTH, "style")}
    used = {*PROMPT, "messages", "extra_info", "reward_model"}
    columns = {key: value for key, value in record.items() if key not in used and value is not None}
    extra = {key: value for key, value in verdict.items() if value is not None} | extra | columns
    known = {name: first(extra, names) for name, names in ALIASES.items()}
    return extra | {name: value for name, value in known.items() if value is not None}


def _opening(record: Mapping[str, Any]) -> tuple[tuple[Message, ...], bool]:
    """The messages a row opens with, and whether they are a bare question."""
    for key in ("prompt", "messages", "raw_prompt"):
        value: Any = record.get(key)
        empty = is_empty(value) or (isinstance(value, Sized) and not len(value))
        messages = () if empty else messages_of(value, where=f"'{key}'")
        while messages and messages[-1].role == "assistant":  # a reply to imitate is not part of the opening
            messages = messages[:-1]
        if messages:
            return messages, isinstance(value, str)
    question = next((record[key] for key in QUESTION if isinstance(record.get(key), str)), None)
    if question is None:
        if wrong := next((key for key in QUESTION if not is_empty(record.get(key))), None):
            raise UserError(f"'{wrong}': expected text, found {describe(record[wrong])}")
        raise UserError(f"a row with the columns {columns_of(record)} has no prompt, messages or question")
    return messages_of(question, where="the question"), True


def reference_of(record: Mapping[str, Any]) -> Any:
    """The ground truth of a record; None if it has none."""
    truth = first(facts(record.get("reward_model")), TRUTH)
    truth = first(record, ANSWER) if truth is None else truth
    # A table with an empty cell holds its whole numbers as floats, and no reply says 4.0.
    return int(truth) if isinstance(truth, float) and truth.is_integer() else truth


def explain_no_answer(records: Sequence[Mapping[str, Any]]) -> str:
    """The error if no record has an answer: the columns, and which of them may be misspelt."""
    columns = dict.fromkeys(str(name) for record in records for name in record)
    strange = [name for name in columns if name not in {*ANSWER, *PROMPT, *WHOLE, *QUESTION, *NAME}]
    hint = next((f"; did you mean '{known}' by '{name}'?" for name in strange if (known := near(name, ANSWER))), "")
    if empty := [name for name in columns if name in ANSWER]:
        return f"no row has an answer: '{empty[0]}' is empty in all of them"
    return f"no row has an answer ({', '.join(ANSWER)}); the columns are {', '.join(columns)}{hint}"


def opening_id(messages: Sequence[Message]) -> str:
    """A short stable name of an opening."""
    text = "\x00".join(f"{m.role}\x01{m.content}" for m in messages)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@dataclass(frozen=True)
class RecordedReplies:
    """A row with the replies to it, or with the conversation that followed."""

    row: Row
    replies: tuple[str, ...] = ()
    said: tuple[Message, ...] = ()
    """What was said after the row's opening, if the record holds a whole conversation."""

    def conversations(self, seed: int = 0) -> list[Conversation]:
        """The conversations to score; each ends with the reply."""
        endings: list[tuple[Message, ...]] = [(Message("assistant", text),) for text in self.replies] or [self.said]
        out = []
        for index, ending in enumerate(endings):
            name, turns = f"{self.row.id}#{index}", tuple(map(heard, (*self.row.messages, *ending)))
            out.append(Conversation(self.row, derive_seed(seed, self.row.id, index), name, turns))
        return out


def heard(message: Message) -> Turn:
    """A message as a turn without an assistant's thought, which becomes a note, as in training."""
    thought, answer = split_thought(message.content) if message.role == "assistant" else ("", message.content)
    return Turn(replace(message, content=answer), note={"thought": thought} if thought else {})


def read_replies(records: Sequence[Mapping[str, Any]], futures: bool = False) -> list[RecordedReplies]:
    """Replies to score from the records of a file.

    A record has `prompt` and `completion` (a text, or a list of them), or `messages`: a whole conversation. That is
    scored as it stands; with `futures` only its last assistant turn is the reply, and what came after it is dropped.
    """
    names = [str(record.get("id", index)) for index, record in enumerate(records)]
    if len(set(names)) < len(names):
        names = [str(index) for index in range(len(records))]
    numbered = enumerate(zip(names, records, strict=True), 1)
    return [_replies(record, name, futures, f"row {number}") for number, (name, record) in numbered]


def _replies(record: Mapping[str, Any], name: str, futures: bool, where: str) -> RecordedReplies:
    opening, replies, whole = (first(record, names) for names in (PROMPT, REPLY, WHOLE))
    if opening is not None and replies is not None:
        texts = replies if isinstance(replies, list) else [replies]
        row = _scored_row(record, name, messages_of(opening, where=where))
        return RecordedReplies(row, tuple(_reply_text(text, where) for text in texts))
    if whole is None:
        raise UserError(f"{where} has neither 'prompt' and 'completion' nor 'messages'; it has {columns_of(record)}")
    messages = messages_of(whole, where=where)
    spoken = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not spoken:
        raise UserError(f"{where}: this conversation has no assistant message to score")
    cut = spoken[-1] if futures else spoken[0]
    ending = messages[cut : cut + 1] if futures else messages[cut:]
    return RecordedReplies(_scored_row(record, name, messages[:cut]), said=ending)


def _scored_row(record: Mapping[str, Any], name: str, opening: tuple[Message, ...]) -> Row:
    interaction = facts(facts(record.get("extra_info")).get("interaction_kwargs"))
    goal = first(record, (*GOAL, *QUESTION[:2]))
    reference = first(record, (*REFERENCE, *ANSWER[:3]))
    return Row(
        name,
        opening,
        first(interaction, (*GOAL, *QUESTION[:2])) if goal is None else goal,
        first(facts(record.get("reward_model")), (*REFERENCE, *ANSWER[:3])) if reference is None else reference,
        str(record.get("data_source", record.get("source", ""))),
        {**facts(record.get("single_turn_metadata")), **facts(record.get("meta")), **interaction},
    )


def _reply_text(value: Any, where: str) -> str:
    """A reply is text, or a message (or a list that ends with one)."""
    if isinstance(value, list) and value:
        value = value[-1]
    text = value if isinstance(value, str) else facts(value).get("content", "" if value == [] else None)
    if not isinstance(text, str):
        raise UserError(f"{where}: expected a reply (text or a message), found {describe(value)}")
    return text


@dataclass(frozen=True)
class Preference:
    """Two replies to the same history; `chosen` is better."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str


def read_dialogues(path: str, key: str = "train.data") -> list[tuple[Message, ...]]:
    """Whole conversations from a parquet or JSONL file with a `messages` column (or prompt and completion).

    A `prompt` that ends with the assistant is a whole conversation, too: so the verl recipe writes them.
    """
    dialogues = []
    for where, record in _examples(path, "data prepare --for sft", key):
        whole, prompt = decode_json(record.get("messages")), record.get("prompt")
        if is_empty(whole) and "prompt" in record and "completion" in record:
            reply = messages_of(record["completion"], "assistant", f"{where}, 'completion'")
            messages = (*messages_of(prompt, where=f"{where}, 'prompt'"), *reply)
        elif is_empty(whole) and is_dialogue(prompt):
            messages = messages_of(prompt, where=f"{where}, 'prompt'")
        elif "messages" in record:
            messages = messages_of(whole, where=f"{where}, 'messages'")
        else:
            raise UserError(f"{where} has no 'messages' and no 'prompt' with 'completion'; it has {columns_of(record)}")
        dialogues.append(messages)
    return dialogues


def read_preferences(path: str, min_gap: float, key: str = "train.data") -> list[Preference]:
    """Pairs of a parquet or JSONL file whose scores are at least `min_gap` apart."""
    pairs = []
    for where, record in _examples(path, "data prepare --for dpo", key):
        record = _split_pair(record)
        _require(record, PAIR, where)
        if min_gap:
            _require(record, PAIR_SCORES, where, f" (train.dpo.min_gap is {min_gap:g})")
            better, worse = (_number(record[name], f"{where}, '{name}'") for name in PAIR_SCORES)
            if better - worse < min_gap - ROUNDING:
                continue
        chosen, rejected = (_one_reply(record[name], f"{where}, '{name}'") for name in PAIR[1:])
        pairs.append(Preference(messages_of(record["prompt"], where=f"{where}, 'prompt'"), chosen, rejected))
    return pairs


def _require(record: Mapping[str, Any], names: Sequence[str], where: str, why: str = "") -> None:
    """Refuse a record that lacks one of the columns; whoever reads a cell checks its content."""
    if absent := [name for name in names if name not in record]:
        raise UserError(f"{where} has no '{absent[0]}'{why}; it has {', '.join(record)}")


def _number(value: Any, where: str) -> float:
    with suppress(TypeError, ValueError):
        if not is_empty(number := float(value)):
            return number
    raise UserError(f"{where}: expected a number, found {describe(value)}")


@dataclass(frozen=True)
class MarkedReply:
    """A reply that was marked good or bad."""

    prompt: tuple[Message, ...]
    reply: str
    good: bool


def read_marked_replies(path: str, key: str = "train.data") -> list[MarkedReply]:
    """The rows of a parquet or JSONL file with `prompt`, `completion` and `label` (true or false, 1 or 0), as TRL's."""
    replies = []
    for where, record in _examples(path, "logs prepare", key):
        _require(record, MARKED, where)
        good = LABELS.get(str(record["label"]).lower())
        if good is None:
            raise UserError(f"{where}: label is {record['label']!r}; it must be true (good) or false (bad)")
        reply = _one_reply(record["completion"], f"{where}, 'completion'")
        replies.append(MarkedReply(messages_of(record["prompt"], where=f"{where}, 'prompt'"), reply, good))
    return replies


def _split_pair(record: dict[str, Any]) -> dict[str, Any]:
    """A pair of whole conversations (open-instruct's) as their common part and the two last messages."""
    chosen, rejected = (record.get(name) for name in PAIR[1:])
    if not isinstance(chosen, list) or not isinstance(rejected, list) or min(len(chosen), len(rejected)) < 2:
        return record
    if chosen[:-1] != rejected[:-1]:
        return record
    return {**record, "prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


def _one_reply(value: Any, where: str) -> str:
    """The text of a reply, which is text or a list of one assistant message."""
    messages = messages_of(value, "assistant", where)
    if [message.role for message in messages] != ["assistant"]:
        roles = ", ".join(message.role for message in messages) or "nothing"
        raise UserError(f"{where}: expected one assistant message, found {roles}")
    return messages[0].content


def _examples(path: str, verb: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a file, each with its name for messages."""
    if not Path(path).is_file():
        how = how_to_prepare(path) or f"make it with `upshot {verb}`"
        what = f"'{path}' is a folder; name one file" if Path(path).is_dir() else f"there is no file '{path}'; {how}"
        raise UserError(f"{key}: {what}")
    records = read_table(Path(path))
    if not records:
        raise UserError(f"{key} '{path}' has no rows")
    return ((f"{key} '{path}', row {number}", record) for number, record in enumerate(records, 1))
