"""Logged conversations → rows: dialogues to imitate, good and bad replies, prefixes of all depths; one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from upshot.core.conversation import Message
from upshot.offline.logs.read import LoggedConversation
from upshot.offline.logs.store import whole
from upshot.tasks.datasets.candidates import Candidate
from upshot.tasks.datasets.parquet import message_dicts, message_list, rl_row, schema_for, write_parquet
from upshot.tasks.users.transcripts import BAD, GOOD, Transcript, ask_outcome

Row = dict[str, Any]
WithGoal = tuple[LoggedConversation, str]


def write_rows(
    out: Path, talks_of: Callable[[str], Iterable[WithGoal]], good_from: float, judged: bool
) -> dict[str, int]:
    """Write the parquet files of both splits; returns their numbers of rows.

    judged: whether there are outcomes at all; if not, all conversations are imitated.
    """
    import pyarrow as pa

    marked = pa.schema(
        [("prompt", message_list()), ("completion", pa.string()), ("label", pa.bool_()), ("conv_id", pa.string())]
    )

    def tables(split: str) -> Iterator[tuple[str, Iterator[Row], Any]]:
        fit = (_dialogue(dialogue) for one in talks_of(split) for dialogue in fit_dialogues(*one, good_from))
        good = (talk for talk, _ in talks_of(split) if not judged or _is_good(talk, good_from))
        yield "fit", fit, schema_for("sft")
        yield "sft", (_dialogue(whole(talk), talk.outcome) for talk in good), schema_for("sft")
        yield "kto", (row for talk, _ in talks_of(split) for row in _marked(talk, good_from)), marked
        yield "rl", prefixes(talks_of(split), split), schema_for("rl")

    sizes = {}
    for split in ("train", "validation"):
        for name, rows, schema in tables(split):
            file = out / f"{name}_{split}.parquet"
            if size := write_parquet(file, rows, schema):
                sizes[file.stem] = size
            else:
                file.unlink()
    return sizes


def fit_dialogues(talk: LoggedConversation, goal: str, good_from: float) -> list[list[Message]]:
    """What the fitted model, which plays everybody, learns from a conversation: user, outcome and assistant."""
    sides = [Transcript(talk.messages, goal).to_dialogue(), whole(talk)]
    if talk.outcome is not None:
        answer = GOOD if talk.outcome >= good_from else BAD
        sides.append([*ask_outcome(goal, talk.messages), Message("assistant", answer)])
    return sides


def _dialogue(messages: Sequence[Message], score: float | None = None) -> dict[str, Any]:
    return {"messages": message_dicts(messages), "conv_id": None, "score": score}


def _is_good(talk: LoggedConversation, good_from: float) -> bool:
    return talk.outcome is not None and talk.outcome >= good_from


def _marked(talk: LoggedConversation, good_from: float) -> Iterator[Row]:
    messages, label = whole(talk), _is_good(talk, good_from)
    for at, message in enumerate(messages):
        if message.role == "assistant" and talk.outcome is not None:
            prompt = message_dicts(messages[:at])
            yield {"prompt": prompt, "completion": message.content, "label": label, "conv_id": talk.place}


def prefixes(talks: Iterable[WithGoal], split: str) -> Iterator[Row]:
    """Every prefix that the assistant replied to, as often as in the logs, so that common ones are trained often."""
    numbers = count()
    for talk, goal in talks:
        for at, message in enumerate(talk.messages):
            if message.role == "assistant":
                one = Candidate(
                    talk.messages[:at], message.content, talk.place, talk.outcome, goal, "", {"kind": talk.kind}
                )
                description = "A customer talks to an assistant."
                yield rl_row(one, talk.system, next(numbers), split, "logs", description, "")
