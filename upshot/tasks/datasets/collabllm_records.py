"""Records of the single-turn sets → what a simulated conversation needs: a hidden goal, a reference, facts.

The columns are those of the published sets: MATH (problem, solution, level, type), Medium articles (title, text),
BigCodeBench (instruct_prompt, canonical_solution, test …), Abg-CoQA (story, target_turn, ambiguity …). Any other file
has `prompt` and `completion` (or `goal` and `reference`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from upshot.core.conversation import Message, Row, messages_from
from upshot.tasks.datasets.collabllm_goals import fingerprint
from upshot.tasks.datasets.tables import Record

HARD = "Level 5"


def math_row(record: Record, source: str) -> Row | None:
    """A problem of MATH at level 5; None for the easier ones."""
    if "problem" not in record:
        return plain_row(record, source)
    if record.get("level", HARD) != HARD:
        return None
    meta = {"level": record.get("level", HARD), "subject": record.get("type", "")}
    return _row(source, str(record["problem"]), str(record.get("solution", "")), meta)


def medium_row(record: Record, source: str) -> Row | None:
    """A Medium article that the user wants to have written."""
    if "text" not in record:
        return plain_row(record, source)
    title, text = str(record.get("title") or "").strip(), str(record["text"]).strip()
    if not text:
        return None
    goal = f"Get this article written, titled “{title}”:\n\n{text}" if title else f"Get this article written:\n\n{text}"
    return _row(source, goal, text, {"title": title, "tags": record.get("tags")})


def code_row(record: Record, source: str) -> Row | None:
    """A BigCodeBench problem with its unit tests."""
    if "instruct_prompt" not in record:
        return plain_row(record, source)
    solution = f"{record.get('code_prompt') or ''}{record.get('canonical_solution') or ''}"
    kept = ("task_id", "test", "entry_point", "libs", "code_prompt")
    meta: dict[str, Any] = {key: record[key] for key in kept if key in record}
    meta["extraction_requirement"] = record.get("extraction_requirement") or code_form(meta)
    return _row(source, str(record["instruct_prompt"]), solution, meta)


def code_form(meta: Mapping[str, Any]) -> str:
    """What extracted code must look like for the tests to find it: the name they call, and how it begins."""
    name, start = str(meta.get("entry_point") or ""), str(meta.get("code_prompt") or "").rstrip()
    told = [f"Runnable Python, no code fences. The function the tests call is `{name}`."] if name else []
    return "\n".join([*told, *([f"It begins with:\n{start}"] if start else [])])


def coqa_row(record: Record, source: str) -> Row | None:
    """A question about a story, ambiguous or not; the user has nothing to hide and says it at once."""
    if "target_turn" not in record:
        return plain_row(record, source)
    target = record["target_turn"]
    ambiguous = record.get("ambiguity") == "ambiguous"
    said = "\n".join(f"Q: {turn['question']}\nA: {turn['answer']}" for turn in record.get("history_turns") or ())
    parts = [str(record["story"]).strip(), said, f"Q: {target['question']}"]
    text = "Read the story and answer the last question.\n\n" + "\n\n".join(part for part in parts if part)
    meta = {"ambiguous": ambiguous, "clarification": record.get("clarification_turn")}
    row = _row(source, text, str(target.get("answer") or ""), meta)
    return Row(row.id, (Message("user", text),), row.goal, row.reference, source, row.meta)


def plain_row(record: Record, source: str) -> Row | None:
    """A row of any prompt/completion file; None when it has no prompt, or is one of sft or dpo parquet."""
    if "chosen" in record or "messages" in record or is_dialogue(record.get("prompt")):
        return None  # prepared for dpo or sft: nothing to play from
    goal = _said(record.get("goal", record.get("single_turn_prompt", record.get("prompt"))))
    reference = _said(record.get("reference", record.get("single_turn_completion", record.get("completion"))))
    if not goal:
        return None
    known = ("goal", "prompt", "reference", "completion", "single_turn_prompt", "single_turn_completion")
    meta = {key: value for key, value in record.items() if key not in known and value is not None}
    return _row(source, goal, reference, meta)


def rl_row(record: Record, source: str) -> Row | None:
    """A row of the RL parquet: the history is the opening, the goal sits in `extra_info`."""
    extra = record.get("extra_info") or {}
    interaction = extra.get("interaction_kwargs") or {}
    goal = interaction.get("single_turn_prompt") or extra.get("single_turn_prompt") or ""
    meta = facts(extra.get("single_turn_metadata"))
    if interaction.get("task_desc"):
        meta["task_desc"] = interaction["task_desc"]
    meta |= {key: extra[key] for key in ("conv_id", "turn_id") if extra.get(key) is not None}
    messages = messages_from(record["prompt"])
    name = f"{source}/{fingerprint(goal)}/{fingerprint(json.dumps([m.to_dict() for m in messages]))}"
    reference = record.get("ground_truth") or (record.get("reward_model") or {}).get("ground_truth")
    return Row(name, messages, goal, reference, record.get("data_source") or source, meta)


def is_dialogue(value: Any) -> bool:
    """Whether a value is the messages of a conversation in which the assistant has the last word."""
    last = value[-1] if isinstance(value, list) and value else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def is_rl(record: Record) -> bool:
    """Whether a record is a row of the RL parquet."""
    return "extra_info" in record and isinstance(record.get("prompt"), list)


def is_candidate(record: Record) -> bool:
    """Whether a record is a row of a published multi-turn set (one candidate reply)."""
    return "single_turn_prompt" in record and isinstance(record.get("prompt"), list)


def facts(value: Any) -> dict[str, Any]:
    """Metadata as a dictionary; files hold it as a struct or as JSON text."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return {"text": value}
    return dict(value) if isinstance(value, Mapping) else {}


def _row(source: str, goal: str, reference: str, meta: Mapping[str, Any]) -> Row:
    known = {key: value for key, value in meta.items() if value not in (None, "")}
    return Row(f"{source}/{fingerprint(goal)}", (), goal, reference, source, known)


def _said(value: Any) -> str:
    """Text of a prompt or completion given as a string or as messages."""
    if isinstance(value, list):
        return "\n\n".join(str(m.get("content") or "") for m in value if isinstance(m, Mapping)).strip()
    return value.strip() if isinstance(value, str) else ""
