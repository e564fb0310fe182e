"""The memory plan in words: the table of `--dry-run` and `upshot pool plan`, and why a run does not fit."""

from __future__ import annotations

from collections.abc import Iterator

from upshot.training.learner.memory.plan import MemoryPlan

GIB = 1 << 30


def table(plan: MemoryPlan) -> str:
    """Each part at both peaks, what was chosen, and where there are several models what each of them takes."""
    unit, word = (GIB, "GiB") if plan.peak >= GIB else (GIB >> 10, "MiB")

    def cell(size: int, width: int = 9) -> str:
        return f"{f'{size / unit:.2f}' if size else '–':>{width}}"

    limit = f"of {plan.limit / GIB:.1f} that can be used" if plan.limit else ""
    rows = [(p.name, p.sampling, p.learning, p.why) for p in plan.parts if p.sampling or p.learning]
    lines = [f"{f'memory, {word}':<17} {'sampling':>9} {'learning':>9}"]
    for name, sampling, learning, why in [*rows, ("together", plan.sampling, plan.learning, limit)]:
        lines.append(f"  {name:<15} {cell(sampling)} {cell(learning)}  {why}".rstrip())
    if plan.helpers:
        lines.append(f"{f'models, {word}':<17} {'weights':>9} {'keys/values':>12} {'steps':>9}")
        for name, weights, kv, step, where in _models(plan, unit):
            lines.append(f"  {name:<15} {cell(weights)} {cell(kv, 12)} {cell(step)}  {where}")
    return "\n".join([*lines, *_describe_choice(plan)])


def arithmetic(plan: MemoryPlan) -> str:
    """The sum of the higher peak, in one line."""
    phase = "learning" if plan.learning >= plan.sampling else "sampling"
    sizes = [(part.name, getattr(part, phase)) for part in plan.parts]
    terms = " + ".join(f"{name} {size / GIB:.1f}" for name, size in sizes if size >= GIB // 20)
    return f"{terms} = {plan.peak / GIB:.1f} GiB while {phase}"


def _models(plan: MemoryPlan, unit: int) -> Iterator[tuple[str, int, int, int, str]]:
    """Weights, keys and values and steps of each model, and its place."""

    def at_most(*names: str) -> int:
        return sum(max(part.sampling, part.learning) for part in plan.parts if part.name in names)

    weights = at_most("weights", "adapters", "merged adapters")
    yield "policy", weights, at_most("keys and values"), at_most("captured steps", "engine's step"), "always there"
    places = {region.name: region for region in plan.layout.regions} if plan.layout else {}
    for helper in plan.helpers:
        kv, where = helper.pages or plan.helper_kv.get(helper.name, 0), "always there"
        if plan.layout and (region := places.get(helper.name)):
            kv, rivals = region.size - helper.weights, plan.layout.rivals(helper.name)
            where = f"{region.start / unit:.2f} to {region.stop / unit:.2f} of the arena"
            where += f", in turn with {', '.join(rivals)}" if rivals else ""
        yield helper.name, helper.weights, kv, helper.step, where
    learner = at_most("optimizer", "reference", "gradients", "activations", "backward")
    yield "learner", learner, 0, 0, "beside the policy, at its peak"


def _describe_choice(plan: MemoryPlan) -> Iterator[str]:
    """The settings in words."""
    setting, names = plan.setting, {part.name for part in plan.parts}
    parts = {"none": "nothing", "mlp": "the way up of every MLP", "block": "each block"}
    yield f"micro-batch  {setting.tokens} tokens, {parts[setting.checkpointing]} is computed again on the way back"
    if plan.limit and "captured steps" in names:
        rest = "gives its memory back while the learner works" if setting.park else "keeps its memory"
        how = {"copy": "merged into a copy", "in place": "merged in place", "never": "called, which is slower"}
        adapters = f"; adapters are {how[setting.merge]}" if "adapters" in names else ""
        yield f"engine       {plan.kv_bytes / GIB:.1f} GiB for keys and values; {rest}{adapters}"
    if plan.layout is not None:
        pairs = ", ".join(f"{a} and {b}" for a, b in plan.layout.conflicts)
        apart = f"never together: {pairs}" if pairs else "all together while they sample"
        rest = "; they leave while the learner works" if setting.helpers == "leave" else ""
        yield f"helpers      in {plan.layout.size / GIB:.2f} GiB, {apart}{rest}"
    if plan.host:
        yield f"host         {plan.host / GIB:.1f} GiB beside the program"
