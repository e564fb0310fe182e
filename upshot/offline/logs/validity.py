"""Does the simulated score of a logged reply predict what really happened? One number, and a plain verdict.

The number is concordance: of two held-out replies with different outcomes, how often the simulation scores the better
one higher (ties count half). With good and bad outcomes it is the AUC. 0.5 is chance.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from upshot.api.reward import Scorer
from upshot.core.conversation import Conversation, Row, Turn, derive_seed
from upshot.core.score import Reason
from upshot.offline.job import Job
from upshot.offline.logs.read import LoggedConversation
from upshot.offline.logs.store import TalkStore, whole
from upshot.offline.statistics import LEVEL, wilson
from upshot.tasks.users.quality import words

GOOD_ENOUGH = 0.7
"""Lower bound of the concordance from which a simulation may be trained on."""
LEVEL_GAP = 0.15
"""The largest allowed difference between the mean simulated score and the share of good outcomes."""
FEWEST = 50
"""With fewer replies nothing is concluded, because the interval would be too wide."""
BINS = 5
RESAMPLES = 1000

POOR = (Reason.BAD_ANSWER, Reason.NOTHING_SAID, Reason.TOO_LONG)
"""Reasons for a missing score that are the simulation's own result, not a failed call."""

Line = Mapping[str, Any]


def choose_replies(store: TalkStore, held_out: bool, most: int, seed: int) -> list[tuple[LoggedConversation, int]]:
    """One reply, at a random depth, of each of at most `most` conversations with an outcome: (conversation, place)."""
    rng = random.Random(derive_seed(seed, "validity"))
    judged = store.rows("rowid", "outcome IS NOT NULL AND held = ?", held_out)
    chosen = [talk for one in rng.sample(judged, min(most, len(judged))) for talk in store.read("rowid = ?", *one)]
    return [(talk, rng.choice(_replies(talk))) for talk in chosen]


def _replies(talk: LoggedConversation) -> list[int]:
    return [at for at, message in enumerate(talk.messages) if message.role == "assistant"]


async def simulate(
    job: Job,
    scorer: Scorer,
    replies: Sequence[tuple[LoggedConversation, int]],
    goal_of: Callable[[LoggedConversation], str],
    lines: dict[str, Line],
) -> None:
    """Play and score the futures of the replies that have no line yet."""

    async def one(piece: tuple[LoggedConversation, int]) -> None:
        talk, at = piece
        *before, reply_message = whole(talk)[: at + 1 + bool(talk.system)]
        row = Row(talk.place, tuple(before), goal_of(talk), None, "logs")
        turns = tuple(map(Turn, (*before, reply_message)))
        (reply,) = await scorer.score_all([Conversation(row, derive_seed(job.args.seed, talk.place), turns=turns)])
        total = reply.reward.total
        line = {"place": talk.place, "outcome": talk.outcome, "kind": talk.kind, "words": count_words(talk, at)}
        first, last = (at == place for place in (_replies(talk)[0], _replies(talk)[-1]))
        line |= {"depth": "last reply" if last else "first reply" if first else "middle reply"}
        line |= {"score": total.value} if total.value is not None else {"missing": str(total.reason)}
        lines[talk.place] = line
        # If the simulation cannot speak or judge, that is a result; only calls that fail for other reasons end the job.
        failed = total.value is None and total.reason not in POOR
        job.write(dict(line), failure=str(total.reason) if failed else None)

    todo = [piece for piece in replies if piece[0].place not in lines]
    await job.run(todo, one, len(replies) - len(todo), "replies")


def count_words(talk: LoggedConversation, at: int) -> int:
    """The number of words up to the end of a reply, for the prediction from length alone."""
    return sum(len(words(message.content)) for message in talk.messages[: at + 1])


def measure(lines: Sequence[Line], trained: Sequence[Line], good_from: float, seed: int = 0) -> dict[str, Any]:
    """Everything about the validity of the simulation; `trained`: lengths and outcomes of the train side."""
    scored = [line for line in lines if "score" in line]
    # The train split decides whether longer means better; validity is measured on the held-out split.
    longer = concordance([(one["words"], one["outcome"]) for one in trained], seed)
    sign = -1 if longer and longer["value"] < 0.5 else 1
    groups = {"all": scored}
    for key in ("depth", "kind"):
        names = sorted({line[key] for line in scored} - {""})
        groups |= {name: [line for line in scored if line[key] == name] for name in names if len(names) > 1}
    reasons = Counter(str(line["missing"]) for line in lines if "missing" in line)
    out: dict[str, Any] = {"replies": len(scored), "missing": dict(reasons), "groups": {}}
    for name, group in groups.items():
        out["groups"][name] = {
            "concordance": concordance([(line["score"], line["outcome"]) for line in group], seed),
            "length": concordance([(sign * line["words"], line["outcome"]) for line in group], seed),
        }
    out["calibration"] = calibrate(scored, good_from)
    count = max(len(scored), 1)
    out["simulated"] = sum(line["score"] for line in scored) / count
    out["real"] = sum(line["outcome"] >= good_from for line in scored) / count
    out["verdict"] = judge(out)
    out["text"] = tell(out)
    return out


def concordance(pairs: Sequence[tuple[float, float]], seed: int = 0) -> dict[str, float] | None:
    """The share of pairs with different outcomes that the scores order in the same way, with its bootstrap interval."""
    import numpy as np

    scores, outcomes = np.array(pairs, dtype=float).reshape(-1, 2).T
    differ = np.sign(outcomes[:, None] - outcomes[None, :])
    right = (differ * np.sign(scores[:, None] - scores[None, :]) + 1) / 2 * np.abs(differ)
    if not differ.any():
        return None
    shares = np.full(len(pairs), 1 / len(pairs))
    drawn = np.random.default_rng(seed).multinomial(len(pairs), shares, RESAMPLES).astype(float)
    with np.errstate(invalid="ignore"):
        resampled = ((drawn @ right) * drawn).sum(1) / ((drawn @ np.abs(differ)) * drawn).sum(1)
    low, high = np.nanquantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"value": float(right.sum() / np.abs(differ).sum()), "low": float(low), "high": float(high), "n": len(pairs)}


def calibrate(lines: Sequence[Line], good_from: float) -> list[dict[str, float]]:
    """Equal-sized bins of replies by simulated score: their mean score, and the share that really ended well."""
    order = sorted(lines, key=lambda line: float(line["score"]))
    bins = [order[len(order) * n // BINS : len(order) * (n + 1) // BINS] for n in range(BINS)]
    out = []
    for group in filter(None, bins):
        share = wilson(sum(line["outcome"] >= good_from for line in group), len(group))
        simulated = sum(line["score"] for line in group) / len(group)
        out.append({"simulated": simulated, "real": share.mean, "low": share.low, "high": share.high, "n": len(group)})
    return out


def judge(validity: Mapping[str, Any]) -> str:
    """What the simulation may be used for; docs/tutorials/logs.md explains the thresholds."""
    agreement, length = (validity["groups"]["all"][key] for key in ("concordance", "length"))
    if agreement is None or agreement["n"] < max(FEWEST, sum(validity["missing"].values())) or agreement["low"] <= 0.5:
        return "do not use"
    level = abs(validity["simulated"] - validity["real"]) <= LEVEL_GAP
    if agreement["low"] >= GOOD_ENOUGH and agreement["value"] > length["value"] and level:
        return "good enough to train on"
    return "only for ranking"


def tell(validity: Mapping[str, Any]) -> str:
    """The validity as one line of text."""
    agreement, length = (validity["groups"]["all"][key] for key in ("concordance", "length"))
    missing = "".join(f"; {count} have no score: {reason}" for reason, count in validity["missing"].items())
    if agreement is None:
        alike = f"{validity['replies']} held-out replies with a score, all with the same outcome{missing}"
        why = alike if validity["replies"] or missing else "no held-out conversation has an outcome"
        return f"validity: {validity['verdict']} ({why})"
    return (
        f"validity: {validity['verdict']}. The simulation orders {agreement['value']:.2f} ({agreement['low']:.2f} to "
        f"{agreement['high']:.2f}) of the pairs of held-out replies as their real outcomes do (n = {agreement['n']}; "
        f"length alone {length['value']:.2f}, chance 0.50). Its mean score is {validity['simulated']:.2f}; "
        f"{validity['real']:.2f} really ended well{missing}"
    )
