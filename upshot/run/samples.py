"""Token ids and log-probabilities of a step's replies beside `rollouts.jsonl`: `samples/000012.npz`. No torch.

For audit, for `upshot replay` and for the page's coloured tokens: what was sampled, exactly, under which
log-probabilities and by which weights, and what each token spells. One compressed file a step; a reply is found by its
`key`, and so is each of the other contexts of an episode that a program played, from its opening on. The ids of futures
are not kept.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
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
    """The samples of replies: one entry a policy turn, its ids and log-probabilities end to end with the others'.

    With `pieces` also the text of the sampled ids, as UTF-8, and how many bytes of it each id spells.
    """
    import numpy as np

    paths = [path for reply in replies for path in reply.paths()]
    turns = [(at, sample) for at, path in enumerate(paths) for sample in path.samples()]
    samples = [sample for _, sample in turns]
    spelt = [piece.encode("utf-8", "replace") for sample in samples for piece in pieces(sample.ids)] if pieces else []
    out = io.BytesIO()
    np.savez_compressed(
        out,
        keys=np.array([path.key for path in paths], dtype=np.str_),
        reply=np.array([at for at, _ in turns], np.int32),
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


def unpack(packed: bytes) -> dict[str, list[Sample]]:
    """The samples of a step's replies by key, in the order of their turns."""
    import numpy as np

    with np.load(io.BytesIO(packed), allow_pickle=False) as file:
        found = {name: file[name].tolist() for name in file.files}
    out: dict[str, list[Sample]] = {key: [] for key in found["keys"]}
    at = seen = 0
    for turn, reply in enumerate(found["reply"]):
        middle = at + found["context"][turn]
        end = middle + found["sampled"][turn]
        thought = tuple(found["thought"][turn])
        out[found["keys"][reply]].append(
            Sample(
                context=tuple(found["ids"][at:middle]),
                ids=tuple(found["ids"][middle:end]),
                logprobs=tuple(found["logprobs"][seen : seen + end - middle]),
                finish=found["finish"][turn],
                version=found["version"][turn],
                thought=None if thought[0] < 0 else (thought[0], thought[1]),
                answer=found["answer"][turn],
            )
        )
        at, seen = end, seen + end - middle
    return out


def spell(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Of each reply of a step its policy turns: where the first sampled id stands, what the ids spell, and how likely.

    Nothing of a turn whose text was not kept.
    """
    import numpy as np

    with np.load(path, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    if not len(found.get("widths", ())):
        return {}
    text, edges = found["text"].tobytes(), np.cumsum([0, *found["widths"]]).tolist()
    all_ids = found["ids"].tolist()
    out: dict[str, list[dict[str, Any]]] = {key: [] for key in found["keys"].tolist()}
    places: dict[int, int] = {}
    seen = packed = 0
    for reply, context, sampled in zip(
        *(found[name].tolist() for name in ("reply", "context", "sampled")), strict=True
    ):
        at, packed = places.get(reply, 0) + context, packed + context
        pieces = [text[edges[n] : edges[n + 1]].decode() for n in range(seen, seen + sampled)]
        logprobs = [round(value, 3) for value in found["logprobs"][seen : seen + sampled].tolist()]
        out[found["keys"][reply].item()].append(
            {"at": at, "ids": all_ids[packed : packed + sampled], "pieces": pieces, "logprobs": logprobs}
        )
        places[reply], seen, packed = at + sampled, seen + sampled, packed + sampled
    return out
