"""The memory plan in words: the table of `upshot train --dry-run`, and why a run does not fit."""

from __future__ import annotations

from upshot.training.learner.memory.plan import MemoryPlan

GIB = 1 << 30


def table(plan: MemoryPlan) -> str:
    """Each part at both peaks, and what was chosen."""
    rows = [(p.name, p.sampling, p.learning, p.why) for p in plan.parts]
    rows.append(("together", sum(r[1] for r in rows), sum(r[2] for r in rows), _limit(plan)))
    unit, word = (GIB, "GiB") if plan.peak >= GIB else (GIB >> 10, "MiB")
    lines = [f"{f'memory, {word}':<17} {'sampling':>9} {'learning':>9}"]
    lines += [f"  {name:<15} {_size(a, unit):>9} {_size(b, unit):>9}  {why}".rstrip() for name, a, b, why in rows]
    return "\n".join([*lines, *chosen(plan)])


def chosen(plan: MemoryPlan) -> list[str]:
    """The settings in words."""
    setting = plan.setting
    again = "each block is computed again on the way back" if setting.checkpointing == "block" else "no checkpointing"
    lines = [f"micro-batch  {setting.tokens} tokens, {again}"]
    if plan.limit and any(part.name == "captured steps" for part in plan.parts):
        kv = f"{plan.kv_bytes / GIB:.1f} GiB for keys and values"
        rest = "gives its memory back while the learner works" if setting.park else "keeps its memory"
        lines.append(f"engine       {kv}; {rest}{_merging(plan)}")
    lines += turns(plan)
    if plan.host:
        lines.append(f"host         {plan.host / GIB:.1f} GiB beside the program")
    return lines


def turns(plan: MemoryPlan) -> list[str]:
    """Which helpers take turns, in words."""
    if plan.overlay is None:
        return []
    pairs = ", ".join(f"{a} and {b}" for a, b in plan.overlay.conflicts)
    apart = f"never together: {pairs}" if pairs else "all together while they sample"
    rest = "; they leave while the learner works" if plan.setting.helpers == "leave" else ""
    return [f"helpers      in {plan.overlay.size / GIB:.2f} GiB, {apart}{rest}"]


def models(plan: MemoryPlan) -> str:
    """A line for each model: weights, keys and values, steps, and its place."""
    unit, word = (GIB, "GiB") if plan.peak >= GIB else (GIB >> 10, "MiB")
    places = {place.name: place for place in plan.overlay.places} if plan.overlay is not None else {}
    parts = {part.name: part for part in plan.parts}

    def at_most(*names: str) -> int:
        return sum(max(parts[name].sampling, parts[name].learning) for name in names if name in parts)

    own = at_most("captured steps", "engine's step")
    weights = at_most("weights", "adapters", "merged adapters")
    rows = [("policy", weights, at_most("keys and values"), own, "always there")]
    for guest in plan.guests:
        place = places.get(guest.name)
        if place is None:
            pages = guest.pages or plan.guest_kv.get(guest.name, 0)
            rows.append((guest.name, guest.weights, pages, guest.step, "always there"))
            continue
        assert plan.overlay is not None
        rivals = plan.overlay.rivals(guest.name)
        where = f"{place.start / unit:.2f} to {place.stop / unit:.2f} of the arena"
        where += f", in turn with {', '.join(rivals)}" if rivals else ""
        rows.append((guest.name, guest.weights, place.size - guest.weights, guest.step, where))
    learner = at_most("optimizer", "reference", "gradients", "activations", "backward")
    lines = [f"{f'models, {word}':<17} {'weights':>9} {'keys/values':>12} {'steps':>9}"]
    for name, held, kv, step, where in rows:
        lines.append(f"  {name:<15} {_size(held, unit):>9} {_size(kv, unit):>12} {_size(step, unit):>9}  {where}")
    return "\n".join([*lines, f"  {'learner':<15} {_size(learner, unit):>9}  beside the policy, at its peak"])


def _merging(plan: MemoryPlan) -> str:
    if not any(part.name == "adapters" for part in plan.parts):
        return ""
    how = {"copy": "merged into a copy", "in place": "merged in place", "never": "called, which is slower"}
    return f"; adapters are {how[plan.setting.merge]}"


def arithmetic(plan: MemoryPlan) -> str:
    """The sum of the higher peak, in one line."""
    learning = sum(p.learning for p in plan.parts) >= sum(p.sampling for p in plan.parts)
    sizes = [(p.name, p.learning if learning else p.sampling) for p in plan.parts]
    terms = " + ".join(f"{name} {size / GIB:.1f}" for name, size in sizes if size >= GIB // 20)
    return f"{terms} = {plan.peak / GIB:.1f} GiB while {'learning' if learning else 'sampling'}"


def _limit(plan: MemoryPlan) -> str:
    return f"of {plan.limit / GIB:.1f} that can be used" if plan.limit else ""


def _size(size: int, unit: int) -> str:
    return f"{size / unit:.2f}" if size else "–"
