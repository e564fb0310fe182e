"""Where a step's time, tokens, memory and money went, in one line."""

from __future__ import annotations

from collections.abc import Mapping

PARTS = ("sample", "futures", "judges", "eval", "learn", "save")


def step_line(metrics: Mapping[str, float]) -> str:
    """One line for the console; what a step does not tell is left out."""
    parts = [f"{name} {seconds:.3g}" for name in PARTS if (seconds := metrics.get(f"time/{name}", 0.0)) >= 0.0005]
    step = metrics.get("time/step")
    time = f"{step:.3g} s" + (f" ({', '.join(parts)})" if parts else "") if step is not None else ""
    missing = sum(value for name, value in metrics.items() if name.startswith("missing/"))
    dollars = metrics.get("time/dollars", 0.0)
    said = (
        time,
        _speed(metrics),
        _memory(metrics),
        f"{missing:.0f} missing" if missing else "",
        f"${dollars:.2f}" if dollars else "",
    )
    return " · ".join(part for part in said if part)


def _speed(metrics: Mapping[str, float]) -> str:
    rates = [
        f"{_short(metrics[f'time/{n}_per_s'])} {n}" for n in ("sampled", "learned") if f"time/{n}_per_s" in metrics
    ]
    mfu = f", MFU {metrics['time/mfu']:.0%}" if "time/mfu" in metrics else ""
    return f"tokens/s {', '.join(rates)}{mfu}" if rates else ""


def _memory(metrics: Mapping[str, float]) -> str:
    peak, planned = metrics.get("time/memory_gib"), metrics.get("time/memory_planned_gib")
    if peak is None:
        return ""
    return f"{peak:.1f} GiB" + (f" of {planned:.1f} planned" if planned else "")


def _short(number: float) -> str:
    return f"{number / 1000:.3g}k" if number >= 1000 else f"{number:.3g}"
