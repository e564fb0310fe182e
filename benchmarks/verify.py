"""Verifiers compared with their peers: gsm8k answers/s, math pairs/s, the pool on one and two workers, its limits.

    python benchmarks/verify.py [--rows 2000] [--seed 0]

Peers, measured in the same run: math-verify called as its README says (for math); one worker (for two). The benchmark
generates answers in the forms of MATH (integers, fractions, roots, polynomials, tuples, intervals, text), half of them
wrong. Each line prints a rate and a ratio. Not covered: verifiers that wait for a model or a sandbox.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from upshot.core.score import Score
from upshot.rewards.workers.base import Manager
from upshot.rewards.workers.pool import InlineManager, PoolManager
from upshot.tasks.verifiers.base import Claim

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "tasks" / "verifiers"))  # the hostile verifier, by name


def gsm8k_claims(rng: random.Random, count: int) -> list[Claim]:
    """Worked answers of a few lines, half of them wrong."""
    claims = []
    for _ in range(count):
        a, b = rng.randint(2, 500), rng.randint(2, 500)
        answer = a + b + rng.choice((0, 1))
        text = f"First there are {a}.\nThen {b} more come: {a} + {b} = {a + b}.\n" * 3 + f"#### {answer:,}"
        claims.append(Claim("gsm8k", text, f"So {a}+{b}=<<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}"))
    return claims


def math_pair(rng: random.Random) -> tuple[str, str]:
    """(answer, truth) in one of the shapes of MATH."""
    a, b, c = (rng.randint(2, 99) for _ in range(3))
    off = rng.choice((0, 0, 1))
    shapes = [
        (f"{a * b + off}", f"{a * b}"),
        (f"{a * b + off}", f"{a * b}"),
        (f"{a * 1000 + b + off:,}", f"{a * 1000 + b}"),
        (f"\\dfrac{{{a + off}}}{{{b}}}", f"\\frac{{{a}}}{{{b}}}"),
        (f"{a}/{b}", f"\\frac{{{a + off}}}{{{b}}}"),
        (f"{a}\\sqrt{{{b}}}", f"{a + off}\\sqrt{{{b}}}"),
        (f"{a + off}\\pi", f"{a} \\pi"),
        (f"({a}, {b + off})", f"({a},{b})"),
        (f"{b}x + {a}", f"{a}+{b + off}x"),
        (f"(x+{a})(x-{b})", f"x^2+{a - b + off}x-{a * b}"),
        (f"[{a}, {a + b})", f"[{a},{a + b + off})"),
        (f"x = {c + off}", f"{c}"),
        (f"\\text{{{rng.choice(('yes', 'no'))}}}", "\\text{yes}"),
        (f"{a + off}^\\circ", f"{a}"),
    ]
    return rng.choice(shapes)


def math_claims(rng: random.Random, count: int) -> list[Claim]:
    """Pairs as claims."""
    pairs = [math_pair(rng) for _ in range(count)]
    return [Claim("math", f"Therefore the answer is $\\boxed{{{answer}}}$.", truth) for answer, truth in pairs]


async def rate(manager: Manager, warm: Sequence[Claim], claims: Sequence[Claim]) -> tuple[float, list[Score]]:
    """Claims a second, all in flight at once, after a warm-up that is not counted."""
    try:
        await asyncio.gather(*(manager.verify(claim) for claim in warm))
        started = time.perf_counter()
        scores = await asyncio.gather(*(manager.verify(claim) for claim in claims))
        return len(claims) / (time.perf_counter() - started), list(scores)
    finally:
        await manager.aclose()


def peer_rate(claims: Sequence[Claim]) -> tuple[float, list[float]]:
    """math-verify by itself: parse both, verify, one after another."""
    import logging

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for claim in claims[:50]:
        verify(parse(f"${claim.reference}$"), parse(claim.response))
    started = time.perf_counter()
    values = [float(verify(parse(f"${claim.reference}$"), parse(claim.response))) for claim in claims]
    return len(claims) / (time.perf_counter() - started), values


async def limits() -> None:
    """What an item that misbehaves costs: its own limit, and no neighbour's answer."""
    for kind in ("loop", "segfault", "memory"):
        manager = PoolManager(workers=2, seconds=2.0, memory_mb=600)
        try:
            await manager.verify(Claim("hostile:Hostile", "a", "a"))
            started = time.perf_counter()
            bad, *good = await asyncio.gather(
                manager.verify(Claim("hostile:Hostile", kind, "a")),
                *(manager.verify(Claim("hostile:Hostile", "a", "a")) for _ in range(20)),
            )
            took = time.perf_counter() - started
            fine = sum(score.value == 1 for score in good)
            print(f"limit 2 s, {kind:9} {took:6.2f} s  {bad.reason}; {fine} of 20 neighbours fine")
        finally:
            await manager.aclose()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)

    claims = gsm8k_claims(rng, args.rows * 10)
    speed, scores = asyncio.run(rate(InlineManager(), claims[:100], claims))
    print(f"gsm8k inline            {speed:10,.0f} answers/s   ({speed / 5000:.1f} x the 5,000 asked for)")

    claims = math_claims(rng, args.rows)
    speed, scores = asyncio.run(rate(InlineManager(workers=2), claims[:100], claims))
    peer, theirs = peer_rate(claims[: min(len(claims), 400)])
    ours = [score.value for score in scores[: len(theirs)]]
    differ = sum(a != b for a, b in zip(ours, theirs, strict=True))
    print(f"math inline, 2 workers  {speed:10,.0f} pairs/s     ({speed / 300:.1f} x the 300 asked for)")
    print(f"math-verify by itself   {peer:10,.0f} pairs/s     ratio {speed / peer:.1f}; verdicts differ on {differ}")

    spins = [Claim("hostile:Hostile", "spin 0.01", "a")] * 200
    one, _ = asyncio.run(rate(PoolManager(workers=1), spins[:2], spins))
    two, _ = asyncio.run(rate(PoolManager(workers=2), spins[:2], spins))
    print(f"pool, 10 ms items       {one:10,.0f} → {two:,.0f} items/s   ratio {two / one:.2f} from one worker to two")
    asyncio.run(limits())


if __name__ == "__main__":
    main()
