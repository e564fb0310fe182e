"""Logged conversations → rows: whom to hold out, what to imitate, what was good and bad, prefixes of all depths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from upshot.core.conversation import Message
from upshot.offline.logs.read import LoggedConversation
from upshot.tasks.datasets.candidates import Candidate
from upshot.tasks.datasets.parquet import message_dicts, message_list, rl_row, schema_for, write_parquet
from upshot.tasks.datasets.splits import fingerprint, hold_out
from upshot.tasks.users.transcripts import BAD, GOOD, Transcript, ask_outcome

Split = list[tuple[LoggedConversation, str]]
"""Conversations with their goals."""


def split_logs(talks: Sequence[LoggedConversation], share: float, seed: int) -> tuple[list[int], list[int], str]:
    """Places of the train and of the held-out conversations, and how they were chosen.

    By customer where there are any, else the latest ones, else by what was said (the same words on the same side).
    """
    if not any(talk.customer for talk in talks) and all(talk.time for talk in talks):
        order = sorted(range(len(talks)), key=lambda at: (_moment(talks[at].time), at))
        cut = len(order) - max(1, round(len(order) * share))
        return order[:cut], order[cut:], "the latest"
    keys = [talk.customer or fingerprint(" ".join(message.content for message in talk.messages)) for talk in talks]
    held = hold_out(keys, share, seed)
    how = "by customer" if any(talk.customer for talk in talks) else "by what was said"
    places = range(len(talks))
    return [at for at in places if keys[at] not in held], [at for at in places if keys[at] in held], how


def _moment(time: str) -> tuple[float, str]:
    """Numbers in their order, everything else (ISO dates) as text."""
    try:
        return float(time), ""
    except ValueError:
        return 0.0, time


def write_rows(out: Path, splits: dict[str, Split], good_from: float) -> dict[str, int]:
    """Write the parquet files of both splits; how many rows each has."""
    import pyarrow as pa

    marked = pa.schema(
        [("prompt", message_list()), ("completion", pa.string()), ("label", pa.bool_()), ("conv_id", pa.string())]
    )
    sizes = {}
    for split, talks in splits.items():
        judged = [(talk, goal) for talk, goal in talks if talk.outcome is not None]
        good = [(talk, goal) for talk, goal in judged if (talk.outcome or 0.0) >= good_from]
        tables: dict[str, tuple[list[dict[str, Any]], Any]] = {
            "fit": ([_dialogue(said) for one in talks for said in fit_dialogues(*one, good_from)], schema_for("sft")),
            "sft": ([_dialogue(whole(talk), talk.outcome) for talk, _ in good], schema_for("sft")),
            "kto": ([row for talk, _ in judged for row in _marked(talk, good_from)], marked),
            "rl": (prefixes(talks, split), schema_for("rl")),
        }
        for name, (rows, schema) in tables.items():
            if rows:
                write_parquet(out / f"{name}_{split}.parquet", rows, schema)
                sizes[f"{name}_{split}"] = len(rows)
    return sizes


def fit_dialogues(talk: LoggedConversation, goal: str, good_from: float) -> list[list[Message]]:
    """What a model that plays everybody learns from a conversation: the user, how it ended, the assistant."""
    sides = [Transcript(talk.messages, goal).to_dialogue(), whole(talk)]
    if talk.outcome is not None:
        answer = GOOD if talk.outcome >= good_from else BAD
        sides.append([*ask_outcome(goal, talk.messages), Message("assistant", answer)])
    return sides


def whole(talk: LoggedConversation) -> list[Message]:
    """What was said, with the system prompt before it."""
    return [*([Message("system", talk.system)] if talk.system else []), *talk.messages]


def _dialogue(said: Sequence[Message], score: float | None = None) -> dict[str, Any]:
    return {"messages": message_dicts(said), "conv_id": None, "score": score}


def _marked(talk: LoggedConversation, good_from: float) -> list[dict[str, Any]]:
    said, label = whole(talk), (talk.outcome or 0.0) >= good_from
    places = [at for at, message in enumerate(said) if message.role == "assistant"]
    rows = [(message_dicts(said[:at]), said[at].content) for at in places]
    return [{"prompt": p, "completion": reply, "label": label, "conv_id": talk.place} for p, reply in rows]


def prefixes(talks: Split, split: str) -> list[dict[str, Any]]:
    """Everything that an assistant replied to, once for each goal."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for talk, goal in talks:
        for at, message in enumerate(talk.messages):
            key = goal, str([one.content for one in talk.messages[:at]])
            if message.role == "assistant" and key not in rows:
                facts = {"kind": talk.kind}
                one = Candidate(talk.messages[:at], message.content, talk.place, talk.outcome, goal, "", facts)
                rows[key] = rl_row(one, talk.system, len(rows), split, "logs", "A customer talks to an assistant.", "")
    return list(rows.values())
