"""Token ids and log-probabilities of a step's replies beside `rollouts.jsonl`: `samples/000012.npz`. No torch.

For audit, for `upshot replay` and for the page's coloured tokens: what was sampled, exactly, under which
log-probabilities and by which weights, and what each token spells. One compressed file a step; found by its `key` is a
reply, each of the other contexts of an episode that a program played, from its opening on, and a future with what the
policy said in it. What others said is in `rollouts.jsonl`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from upshot.core.conversation import Sample
from upshot.rollout.rollout import Rollout

FOLDER = "samples"
Pieces = Callable[[Sequence[int]], Sequence[str]]
"""Token ids → what each of them spells."""


def file_of(run: Path, step: int) -> Path:
    """Where a step's samples lie."""
    return run / FOLDER / f"{step:06d}.npz"


def pack(replies: Sequence[Rollout], pieces: Pieces | None = None) -> bytes:
    """The samples of replies and their futures: each once, its ids and log-probabilities end to end with the others'.

    With `pieces` also the text of the sampled ids, as UTF-8, and how many bytes of it each id spells.
    """
    import numpy as np

    kept = list(_own_samples(replies))
    # Futures that forked late have turns in common: those are one sample, which each of them refers to.
    places: dict[int, int] = {}
    turns = [
        (at, places.setdefault(id(sample), len(places)))
        for at, (_, _, of_reply) in enumerate(kept)
        for sample in of_reply
    ]
    samples = list({id(sample): sample for _, _, of_reply in kept for sample in of_reply}.values())
    spelt = [piece.encode("utf-8", "replace") for sample in samples for piece in pieces(sample.ids)] if pieces else []
    out = io.BytesIO()
    np.savez_compressed(
        out,
        keys=np.array([key for key, _, _ in kept], dtype=np.str_),
        before=np.array([before for _, before, _ in kept], np.int32),
        reply=np.array([at for at, _ in turns], np.int32),
        place=np.array([place for _, place in turns], np.int32),
        context=np.array([len(sample.context) for sample in samples], np.int32),
        sampled=np.array([len(sample.ids) for sample in samples], np.int32),
        thought=np.array([sample.thought or (-1, -1) for sample in samples], np.int32).reshape(-1, 2),
        answer=np.array([sample.answer for sample in samples], np.int32),
        version=np.array([sample.version for sample in samples], np.int32),
        finish=np.array([sample.finish for sample in samples], dtype=np.str_),
        ids=np.array([token for sample in samples for token in (*sample.context, *sample.ids)], np.int32),
        logprobs=np.array([value for sample in samples for value in sample.logprobs], np.float32),
        text=np.frombuffer(b"".join(spelt), np.uint8),
        widths=np.array([len(piece) for piece in spelt], np.int32),
    )
    return out.getvalue()


def _own_samples(replies: Sequence[Rollout]) -> Iterator[tuple[str, int, list[Sample]]]:
    """Key, ids before the first sample and samples of each context of a reply, and of each future in which the policy
    spoke."""
    for reply in replies:
        for path in reply.paths():
            yield path.key, 0, list(path.samples())
        for future in reply.futures:
            whole = future.conversation
            shared = [turn.sample for turn in whole.turns[: future.shared] if turn.sample is not None]
            later = list(whole.samples())[len(shared) :]
            if later:
                yield whole.key, sum(len(sample.context) + len(sample.ids) for sample in shared), later


def unpack(packed: bytes) -> dict[str, list[Sample]]:
    """The samples of a step's replies and futures by key, in the order of their turns."""
    columns, samples = _load(packed)
    out: dict[str, list[Sample]] = {key: [] for key in columns["keys"]}
    for owner, place in zip(columns["reply"], columns["place"], strict=True):
        out[columns["keys"][owner]].append(samples[place])
    return out


def spell(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Of each reply and future of a step its policy turns: where the first sampled id stands among the conversation's,
    what the ids spell, and how likely they were. Nothing of a file that kept no text.
    """
    columns, samples = _load(path.read_bytes())
    if not columns["widths"]:
        return {}
    text, keys = bytes(columns["text"]), columns["keys"]
    pieces = [text[start:end].decode() for start, end in pairwise(accumulate(columns["widths"], initial=0))]
    first = list(accumulate(columns["sampled"], initial=0))
    out: dict[str, list[dict[str, Any]]] = {key: [] for key in keys}
    ends = columns["before"]
    for owner, place in zip(columns["reply"], columns["place"], strict=True):
        sample, at = samples[place], ends[owner] + columns["context"][place]
        likely = [round(value, 3) for value in sample.logprobs]
        spelt = pieces[first[place] : first[place + 1]]
        out[keys[owner]].append({"at": at, "ids": [*sample.ids], "pieces": spelt, "logprobs": likely})
        ends[owner] = at + len(sample.ids)
    return out


def _load(packed: bytes) -> tuple[dict[str, Any], list[Sample]]:
    """The columns of a file, and its samples."""
    import numpy as np

    with np.load(io.BytesIO(packed), allow_pickle=False) as file:
        columns = {name: file[name].tolist() for name in file.files}
    samples: list[Sample] = []
    at = seen = 0
    for number, (context, sampled) in enumerate(zip(columns["context"], columns["sampled"], strict=True)):
        middle, thought = at + context, columns["thought"][number]
        samples.append(
            Sample(
                context=tuple(columns["ids"][at:middle]),
                ids=tuple(columns["ids"][middle : middle + sampled]),
                logprobs=tuple(columns["logprobs"][seen : seen + sampled]),
                finish=columns["finish"][number],
                version=columns["version"][number],
                thought=None if thought[0] < 0 else (thought[0], thought[1]),
                answer=columns["answer"][number],
            )
        )
        at, seen = middle + sampled, seen + sampled
    return columns, samples
