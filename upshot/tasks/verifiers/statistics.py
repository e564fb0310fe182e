"""How two lists of scores agree. Pure; pairs in which either score is missing are left out and counted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from upshot.core.score import Score


def valid_pairs(predictions: Sequence[Score], truths: Sequence[Score]) -> list[tuple[float, float]]:
    """(prediction, truth) where both have a value."""
    if len(predictions) != len(truths):
        raise ValueError(f"{len(predictions)} predictions for {len(truths)} truths")
    pairs = zip(predictions, truths, strict=True)
    return [(p.value, t.value) for p, t in pairs if p.value is not None and t.value is not None]


def binary_metrics(predictions: Sequence[Score], truths: Sequence[Score], threshold: float = 0.5) -> dict[str, float]:
    """Confusion counts and rates; a rate with nothing below the line is left out, because it is undefined."""
    pairs = valid_pairs(predictions, truths)
    hits = [(p >= threshold, t >= threshold) for p, t in pairs]
    tp = sum(p and t for p, t in hits)
    tn = sum(not p and not t for p, t in hits)
    fp = sum(p and not t for p, t in hits)
    fn = sum(t and not p for p, t in hits)
    out: dict[str, float] = {"tp": tp, "tn": tn, "fp": fp, "fn": fn}
    out |= _ratio("precision", tp, tp + fp) | _ratio("recall", tp, tp + fn) | _ratio("f1", 2 * tp, 2 * tp + fp + fn)
    out |= _ratio("accuracy", tp + tn, len(pairs)) | _ratio("tpr", tp, tp + fn) | _ratio("tnr", tn, tn + fp)
    return out | {"valid": len(pairs), "missing": len(predictions) - len(pairs)}


def graded_metrics(predictions: Sequence[Score], truths: Sequence[Score]) -> dict[str, float]:
    """Errors, means and Pearson's correlation (left out when either side is constant)."""
    pairs = valid_pairs(predictions, truths)
    out: dict[str, float] = {"valid": len(pairs), "missing": len(predictions) - len(pairs)}
    if not pairs:
        return out
    n = len(pairs)
    mse = sum((p - t) ** 2 for p, t in pairs) / n
    mean_p, mean_t = sum(p for p, _ in pairs) / n, sum(t for _, t in pairs) / n
    out |= {"mse": mse, "rmse": math.sqrt(mse), "mean_prediction": mean_p, "mean_truth": mean_t}
    var_p = sum((p - mean_p) ** 2 for p, _ in pairs)
    var_t = sum((t - mean_t) ** 2 for _, t in pairs)
    if var_p > 0 and var_t > 0:
        cov = sum((p - mean_p) * (t - mean_t) for p, t in pairs)
        out["correlation"] = cov / math.sqrt(var_p * var_t)
    return out


def _ratio(name: str, above: float, below: float) -> dict[str, float]:
    return {name: above / below} if below else {}
