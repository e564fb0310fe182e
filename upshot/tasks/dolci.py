"""Mixed sets of the Dolci and OLMo kind: every row goes to the verifier that its label names.

`dataset` and `ground_truth` are lists side by side (or bare values); a row with several labels is scored by the first
one that a verifier is known for, against the ground truth beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from upshot.core.conversation import Row
from upshot.core.errors import UserError
from upshot.tasks.base import tasks
from upshot.tasks.verified import VerifiedTask
from upshot.tasks.verifiers.base import verifiers
from upshot.tasks.verifiers.routes import verifier_of_label

SPEAKER = "user: "
"""What the published sets put before a prompt that is a text."""


@tasks.register("dolci", "olmo-mix")
class Dolci(VerifiedTask):
    """Mathematics, code, constraints and judged requests in one file."""

    hub = "allenai/Dolci-Instruct-RL"

    def parse(self, record: Mapping[str, Any]) -> Row:
        """A record as a row with its own verifier; `UserError` if its label names no known verifier."""
        record = pick_label(record)
        if isinstance(record.get("prompt"), str):
            record = {**record, "prompt": record["prompt"].removeprefix(SPEAKER)}
        row = super().parse(record)
        if row.source not in verifiers:
            label = record.get("dataset") or record.get("data_source")
            raise UserError(
                f"no verifier for the label {label!r} (row {row.id}); `upshot data prepare --task dolci` leaves such "
                f"rows out"
            )
        return row


def pick_label(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record with one label and the ground truth beside it, where both are lists of the same length."""
    labels, truths = record.get("dataset"), record.get("ground_truth")
    if not isinstance(labels, list) or not labels:
        return record
    at = next((n for n, label in enumerate(labels) if verifier_of_label(label)), 0)
    if isinstance(truths, list) and len(truths) == len(labels):
        record = {**record, "ground_truth": truths[at]}
    return {**record, "dataset": labels[at]}
