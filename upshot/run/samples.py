"""Token ids and log-probabilities of a step's replies beside `rollouts.jsonl`: `samples/000012.npz`. No torch.

For audit, for `upshot replay` and for the page's coloured tokens: what was sampled, exactly, under which
log-probabilities and by which weights, and what each token spells. One compressed file a step; found by its `key` is a
reply, each of the other contexts of an episode that a program played, from its opening on, and a future with what the
policy said in it. What others said is in `rollouts.jsonl`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from upshot.core.conversation import Sample
from upshot.rollout.reply import Rollout

FOLDER = "samples"
Pieces = Callable[[Sequence[int]], Sequence[str]]
"""Token ids → what each of them spells."""


def file_of(run: Path, step: int) -> Path:
    """Where a step's samples lie."""
    return run / FOLDER / f"{step:06d}.npz"


def pack(replies: Sequence[Rollout], pieces: Pieces | None = None) -> bytes:
    """The samples of replies and their futures: each once, its ids and log-probabilities end to end with the others'.

    With `pieces` also what each of the sampled ids spells.
    """
    import numpy as np

    # Futures that forked late have turns in common: those are one sample, which each of them refers to.
    talks: list[tuple[str, int, list[Sample]]] = []  # of each: key, ids before the first sample, samples
    for reply in replies:
        for path in reply.paths():
            talks.append((path.key, 0, list(path.samples())))
        for future in reply.futures:  # those in which the policy spoke
            if later := list(future.conversation.places(future.shared)):
                at, first = later[0]
                talks.append((future.conversation.key, at - len(first.context), [sample for _, sample in later]))
    index: dict[str, list[Any]] = {"talks": [], "samples": [], "pieces": []}
    ids: list[int] = []
    logprobs: list[float] = []
    places: dict[int, int] = {}
    for key, before, spoken in talks:
        for s in spoken:
            if id(s) not in places:
                places[id(s)] = len(places)
                index["samples"].append((len(s.context), len(s.ids), s.thought, s.answer, s.version, s.finish))
                ids += s.context + s.ids
                logprobs += s.logprobs
                if pieces is not None:
                    index["pieces"].append([piece.encode("utf-8", "replace").decode() for piece in pieces(s.ids)])
        index["talks"].append((key, before, [places[id(s)] for s in spoken]))
    out = io.BytesIO()
    text = np.frombuffer(json.dumps(index).encode(), np.uint8)
    np.savez_compressed(out, index=text, ids=np.array(ids, np.int32), logprobs=np.array(logprobs, np.float32))
    return out.getvalue()


def unpack(packed: bytes) -> dict[str, list[Sample]]:
    """The samples of a step's replies and futures by key, in the order of their turns."""
    index, samples = _load(packed)
    return {key: [samples[place] for place in places] for key, _, places in index["talks"]}


def spell(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Of each reply and future of a step its policy turns: where the first sampled id stands among the conversation's,
    what the ids spell, and how likely they were. Nothing of a file that kept no text.
    """
    index, samples = _load(path.read_bytes())
    out: dict[str, list[dict[str, Any]]] = {}
    for key, at, places in index["talks"] if index["pieces"] else ():
        turns = out[key] = []
        for place in places:
            sample = samples[place]
            at += len(sample.context)
            likely = [round(value, 3) for value in sample.logprobs]
            turns.append({"at": at, "ids": [*sample.ids], "pieces": index["pieces"][place], "logprobs": likely})
            at += len(sample.ids)
    return out


def _load(packed: bytes) -> tuple[dict[str, Any], list[Sample]]:
    """The index of a file, and its samples."""
    import numpy as np

    with np.load(io.BytesIO(packed), allow_pickle=False) as file:
        if "index" not in file.files:  # written by an earlier version
            return {"talks": [], "samples": [], "pieces": []}, []
        index, ids, logprobs = json.loads(file["index"].tobytes()), file["ids"].tolist(), file["logprobs"].tolist()
    samples: list[Sample] = []
    at = seen = 0
    for context, sampled, thought, answer, version, finish in index["samples"]:
        middle, end = at + context, at + context + sampled
        spoken = tuple(ids[at:middle]), tuple(ids[middle:end]), tuple(logprobs[seen : seen + sampled])
        samples.append(Sample(*spoken, finish, version, tuple(thought) if thought else None, answer))
        at, seen = end, seen + sampled
    return index, samples
