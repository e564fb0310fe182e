"""`upshot data prepare --for user`: chat transcripts → dialogues that teach a model to speak as the user.

Roles are swapped and the goal comes first, in the format that the simulated user `plain` uses; leaving is the end mark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from upshot.offline.data.prepare import PrepareSummary, parse_all, read_splits, write_splits
from upshot.tasks.datasets.files import Record
from upshot.tasks.datasets.parquet import schema_for
from upshot.tasks.users.transcripts import Transcript, transcript_of


def prepare_user(dataset: str, out: Path, validation: float = 0.1, seed: int = 0) -> PrepareSummary:
    """Write `user_train.parquet` and `user_validation.parquet` under `out`, and say what was dropped."""

    def parse(records: Sequence[Record], dropped: Counter[str]) -> list[Transcript]:
        return parse_all(records, transcript_of, dropped)

    splits: dict[str, list[Transcript]]
    summary, splits = read_splits(dataset, out, "user", parse, lambda some: [t.goal for t in some], validation, seed)
    rows = {}
    for split, transcripts in splits.items():
        summary.goals[split] = len({transcript.goal for transcript in transcripts})
        dialogues = [[message.to_dict() for message in transcript.to_dialogue()] for transcript in transcripts]
        rows[split] = [{"messages": messages, "conv_id": None, "score": None} for messages in dialogues]
    write_splits(dataset, out, rows, schema_for("sft"), summary)
    return summary
