"""Log-probabilities of given ids: which places of a step they need, and how they come out of its logits.

A chunk of a prompt gives the log-probability of the id after each one it reads, so scoring is reading: no id is
sampled, pages are shared as ever, and the scheduler bounds how many places have logits in one step.
Log-probabilities are log softmax(logits) in float32, at temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from upshot.engine.scheduler import Chunk
from upshot.engine.sequence import Scored, Sequence, Top, likeliest

NUMBERS = 1 << 25
"""Logits that are float32 at one time."""


@dataclass(slots=True)
class ScoreRequest:
    """What a step scores."""

    places: list[int]
    """Where among the step's tokens."""
    ids: list[int]
    """The id given after each place."""
    shares: list[tuple[Sequence, int]]
    """Whose places they are, in order, and how many."""
    tops: int
    """The most likeliest ids that any of the sequences asks for."""


def score_request(chunks: list[Chunk]) -> ScoreRequest | None:
    """What these chunks, packed one after another, score; None: nothing."""
    if not any(chunk.seq.given for chunk in chunks):
        return None
    wanted = ScoreRequest([], [], [], 0)
    offset = 0
    for chunk in chunks:
        after = chunk.scored
        if after:
            wanted.places += range(offset + after.start - 1 - chunk.start, offset + after.stop - 1 - chunk.start)
            wanted.ids += chunk.seq.ids[after.start : after.stop]
            wanted.shares.append((chunk.seq, len(after)))
            wanted.tops = max(wanted.tops, chunk.seq.rules.top_logprobs)
        offset += chunk.stop - chunk.start
    return wanted if wanted.shares else None


def given_logprobs(logits: Tensor, ids: Tensor, tops: int) -> tuple[Tensor, ...]:
    """log softmax of each row at its id; with `tops`, also the values and ids of the likeliest ones, [rows, tops]."""
    rows = max(1, NUMBERS // logits.shape[1])
    parts = []
    for some, chosen in zip(logits.split(rows), ids.split(rows), strict=True):
        every = some.float().log_softmax(-1)
        picked = every.gather(-1, chosen[:, None])[:, 0]
        parts.append((picked, *every.topk(min(tops, every.shape[1]), dim=-1)) if tops else (picked,))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def by_sequence(wanted: ScoreRequest, results: tuple[Tensor, ...]) -> list[Scored]:
    """What `given_logprobs` found, for each sequence."""
    logprobs = results[0].tolist()
    values, order = (x.tolist() for x in results[1:]) if wanted.tops else ([], [])
    out: list[Scored] = []
    at = 0
    for seq, count in wanted.shares:
        tops: list[Top] = []
        if seq.rules.top_logprobs:
            pairs = zip(order[at : at + count], values[at : at + count], strict=True)
            tops = [likeliest(o, v, seq.rules.top_logprobs) for o, v in pairs]
        out.append((seq, logprobs[at : at + count], tops))
        at += count
    return out
