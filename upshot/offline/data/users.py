"""`upshot data prepare --for user`: chat transcripts → dialogues in which the user's side is what is imitated.

Roles are swapped and the goal stands before them, as the simulated user `plain` is asked; its leaving is the end mark.
"""

from __future__ import annotations

from pathlib import Path

from upshot.core.files import check_writable
from upshot.offline.data.prepare import PrepareSummary, check_share, parse_all, write_splits
from upshot.tasks.datasets.files import read_tables
from upshot.tasks.datasets.parquet import schema_for
from upshot.tasks.datasets.splits import split_in_two
from upshot.tasks.users.transcripts import transcript_of


def prepare_user(dataset: str, out: Path, validation: float = 0.1, seed: int = 0) -> PrepareSummary:
    """Write `user_train.parquet` and `user_validation.parquet` under `out`, and say what was dropped."""
    check_share(validation)
    check_writable(out / "user_train.parquet")
    tables = read_tables(dataset)
    summary = PrepareSummary("user", read=sum(map(len, tables.values())))
    parsed = {split: parse_all(records, transcript_of, summary.dropped) for split, records in tables.items()}
    train, held_out, leaked = split_in_two(parsed, lambda some: [one.goal for one in some], validation, seed)
    if leaked:
        summary.dropped["goal also in validation"] += leaked
    rows = {}
    for split, some in (("train", train), ("validation", held_out)):
        dialogues = [[message.to_dict() for message in one.to_dialogue()] for one in some]
        rows[split] = [{"messages": said, "conv_id": None, "score": None} for said in dialogues]
        summary.goals[split] = len({one.goal for one in some})
    write_splits(dataset, out, rows, schema_for("sft"), summary)
    return summary
