"""Records of any layout as rows: verl, TRL columns, question/answer and problem/solution sets.

A record is recognised by its columns, never by its file name:
- verl: `data_source`, `prompt` (messages), `reward_model.ground_truth`, `extra_info` (prepared by this project:
  with the row's other columns as JSON text under `metadata`)
- TRL and open-instruct: `prompt` or `messages` (text or messages), `ground_truth`/`answer`/`solution`, `dataset`
- plain: `question`/`problem`/`query`/`input` and `answer`/`solution`/`target`
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from upshot.core.conversation import Message, Row, messages_from
from upshot.core.errors import UserError
from upshot.tasks.verifiers.routes import route

QUESTIONS = ("question", "problem", "query", "input", "instruction", "text")
ANSWERS = (
    "ground_truth",
    "answer",
    "solution",
    "target",
    "label",
    "reference",
    "completion",
    "answers",
    "output",
    "answerKey",
)
METADATA = "metadata"
"""Where in `extra_info` prepared rows keep what else they know, as JSON text."""


def row_of(record: Mapping[str, Any], source: str, instructions: str = "", system: str = "") -> Row:
    """A record as a row; `instructions` are put behind a bare question, not behind a prompt that has its own.

    `source` is the verifier when the record names none.
    """
    extra = dict(_mapping(record.get("extra_info")) or {})
    extra |= _mapping(extra.pop(METADATA, None)) or {}
    messages, bare = _opening(record)
    if bare and instructions:
        last = messages[-1]
        messages = (*messages[:-1], Message(last.role, f"{last.content}\n\n{instructions}"))
    if system and messages[0].role != "system":
        messages = (Message("system", system), *messages)
    used = {"prompt", "messages", "extra_info", "reward_model", "raw_prompt"}
    extra |= {key: value for key, value in record.items() if key not in used and value is not None}
    question = next((m.content for m in reversed(messages) if m.role == "user"), "")
    extra.setdefault("question", question)
    named = next((str(extra[key]) for key in ("id", "row_id", "task_id", "unique_id") if extra.get(key)), None)
    return Row(named or fingerprint(messages), messages, None, reference_of(record), route(record, source), extra)


def reference_of(record: Mapping[str, Any]) -> Any:
    """The ground truth of a record; None where it has none."""
    model = _mapping(record.get("reward_model"))
    if model and _is_there(model.get("ground_truth")):
        return model["ground_truth"]
    return next((record[key] for key in ANSWERS if _is_there(record.get(key))), None)


def has_nan_answer(record: Mapping[str, Any]) -> bool:
    """Whether a record's only answer is NaN."""
    return reference_of(record) is None and any(map(_is_nan, map(record.get, ANSWERS)))


def _is_there(value: Any) -> bool:
    """Whether a cell holds anything: tables of pandas have NaN where there is nothing."""
    return value is not None and not _is_nan(value)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def fingerprint(messages: Sequence[Message]) -> str:
    """A short stable name of an opening."""
    text = "\x00".join(f"{m.role}\x01{m.content}" for m in messages)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _opening(record: Mapping[str, Any]) -> tuple[tuple[Message, ...], bool]:
    """The messages a row opens with, and whether they are a bare question."""
    for key in ("prompt", "messages", "raw_prompt"):
        value: Any = record.get(key)
        if isinstance(value, str) and value:
            return (Message("user", value),), True
        if value is not None and not isinstance(value, str) and len(value):
            said = messages_from(value)
            while said and said[-1].role == "assistant":  # the reply to imitate is not part of the opening
                said = said[:-1]
            if said:
                return said, False
    for key in QUESTIONS:
        if isinstance(record.get(key), str):
            return (Message("user", record[key]),), True
    raise UserError(f"a row with the columns {', '.join(record)} has no prompt; expected prompt, messages or question")


def _mapping(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = json.loads(value)
    return value if isinstance(value, Mapping) else None
