"""Numbers of a step about classmates, under classmate/."""

from __future__ import annotations

from collections.abc import Sequence

from upshot.rollout.futures.classmates.options import CLASSMATE, UNMASKED
from upshot.rollout.futures.classmates.parts import agreement, verdicts_by_classmate
from upshot.rollout.futures.classmates.thought_cut import last_sample, thought_span
from upshot.rollout.reply import Rollout


def classmate_metrics(replies: Sequence[Rollout], names: Sequence[str], whole_reply: bool) -> dict[str, float]:
    """Classmates' scores, lengths of thoughts and answers, answers that were cut, agreement."""
    out: dict[str, float] = {}

    def put(name: str, values: Sequence[float]) -> None:
        if values:
            out[f"{CLASSMATE}/{name}"] = sum(values) / len(values)

    asked = [future for reply in replies for future in reply.futures if future.cut]
    futures = [future for future in asked if CLASSMATE in future.scores]
    put(UNMASKED, [score.value for f in asked if (score := f.scores.get(UNMASKED)) and score.value is not None])
    for name in names:
        scores = [future.scores[CLASSMATE] for future in futures if future.by == name]
        put(f"{name}/score", [score.value for score in scores if score.value is not None])
        out[f"{CLASSMATE}/{name}/missing"] = float(sum(score.is_missing for score in scores))
    put("score", [f.scores[CLASSMATE].value or 0.0 for f in futures if not f.scores[CLASSMATE].is_missing])
    notes = [turn.note for future in futures for turn in future.conversation.turns[-1:] if "finish" in turn.note]
    put("answer_tokens", [float(note["tokens"]) for note in notes])
    put("cut", [float(note["finish"] == "length") for note in notes])
    places = [place for reply in replies if (place := last_sample(reply.conversation)) is not None]
    spans = [(thought_span(sample, whole_reply), sample) for _, sample in places]
    lengths = [(stop - start, len(sample.ids) - sample.answer) for (start, stop), sample in spans]
    put("thought_length", [float(thought) for thought, _ in lengths])
    put("reply_length", [float(answer) for _, answer in lengths])
    put("no_thought", [float(thought == 0) for thought, _ in lengths])
    shares = [agreement(verdicts_by_classmate(reply.futures)) for reply in replies]
    put("agreement", [share for share in shares if share is not None])
    return out
