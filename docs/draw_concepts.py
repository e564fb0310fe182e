"""Draws docs/loop.svg (a step), docs/tree.svg (a prompt, replies, futures, advantages), docs/sizes.svg (where it runs).

    python docs/draw_concepts.py

The advantages in the tree are computed from its rewards, by the quickstart's rule (`dr-grpo`: minus the mean).
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
INK, SOFT, LINE, PAPER = "#1f2937", "#6b7280", "#94a3b8", "#ffffff"
POLICY, OTHER, UP, DOWN = "#eef2ff", "#f8fafc", "#1f6f5c", "#b4532a"
LOOP = (
    ("reply", "the policy answers", "“For what time?”"),
    ("fork", "several futures of it", "2 futures"),
    ("continue", "a user, classmate or", "environment answers"),
    ("score", "the end of each future", "1 and 0"),
    ("credit", "which tokens earn it", "+0.25 for the reply"),
    ("learn", "one optimizer step", "on the sampled ids"),
)
SIZES = (
    ("a laptop", "upshot train RECIPE", ("one process, on the CPU", "breakpoint() works"), 0, 1),
    ("one GPU", "upshot train RECIPE", ("one process", "sampler and learner share weights"), 1, 1),
    (
        "one machine",
        "torchrun … -m upshot train RECIPE",
        ("one process for each GPU", "each does a part of the work"),
        4,
        1,
    ),
    ("many machines", "upshot train RECIPE --engine verl", ("Ray and verl", "so far run on one machine only"), 4, 3),
)
"""Where a recipe runs: title, command, two lines, GPUs of a machine, machines."""
REPLIES = (
    (
        "“Booked for 7.”",
        (("“I meant 8.”", "“I see.”", 0.0), ("“Not 7!”", "“Booked for 7.”", 0.0)),
    ),
    (
        "“For what time?”",
        (("“8, please.”", "“Booked for 8.”", 1.0), ("“8.”", "“Booked for 7.”", 0.0)),
    ),
)


def text(
    words: str, x: float, y: float, size: int = 14, ink: str = INK, anchor: str = "middle", weight: int = 400
) -> str:
    """A line of text."""
    style = f'font-size="{size}" fill="{ink}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{words}</text>'


def box(x: float, y: float, wide: float, high: float, fill: str, edge: str = LINE, width: float = 1.2) -> str:
    """A rounded box."""
    place = f'x="{x:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{high:.0f}"'
    return f'<rect {place} rx="{min(9, high / 4):.0f}" fill="{fill}" stroke="{edge}" stroke-width="{width}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line from box to box that bends once."""
    middle = (x1 + x2) / 2
    path = f"M{x1:.0f} {y1:.0f}C{middle:.0f} {y1:.0f} {middle:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"
    return f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.6" marker-end="url(#tip)"/>'


def picture(width: int, height: int, parts: list[str]) -> str:
    """The parts as a file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif">'
    )
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip += f'<path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker>'
    back = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    return "\n".join([head, back, f"<defs>{tip}</defs>", *parts, "</svg>", ""])


def draw_loop() -> str:
    """The six words of a step, and the way back."""
    wide, gap, left, top = 158, 26, 16, 24
    parts = []
    for number, (word, what, example) in enumerate(LOOP):
        x = left + number * (wide + gap)
        trained = word in ("reply", "learn")
        parts.append(box(x, top, wide, 92, POLICY if trained else OTHER, INK if trained else LINE))
        middle = x + wide / 2
        parts += [text(word, middle, top + 30, 18, weight=600), text(what, middle, top + 54, 13, SOFT)]
        parts.append(text(example, middle, top + 74, 13, SOFT))
        if number:
            parts.append(arrow(x - gap, top + 46, x - 2, top + 46))
    first, last = left + wide / 2, left + 5 * (wide + gap) + wide / 2
    way = f"M{last:.0f} {top + 92}v30H{first:.0f}v-27"
    parts.append(f'<path d="{way}" fill="none" stroke="{LINE}" stroke-width="1.6" marker-end="url(#tip)"/>')
    parts.append(text("the next step, with the new weights", (first + last) / 2, top + 142, 13, SOFT))
    return picture(1110, 184, parts)


def draw_tree() -> str:
    """A prompt, two replies, two futures of each; beside what the policy says, its advantage."""
    means = [statistics.fmean(reward for *_, reward in futures) for _, futures in REPLIES]
    group = statistics.fmean(means)
    columns = (16, 178, 424, 592, 842)
    heads = ("prompt", "reply (trained)", "the user answers", "the policy (trained along the tree)", "score")
    parts = [text(head, x, 24, 13, SOFT, "start") for head, x in zip(heads, columns, strict=True)]
    parts += [box(columns[0], 162, 126, 46, OTHER), text("“A table, please.”", columns[0] + 63, 190, 13)]
    for number, ((reply, futures), mean) in enumerate(zip(REPLIES, means, strict=True)):
        middle = 100 + number * 170
        parts.append(arrow(columns[0] + 126, 185, columns[1] - 2, middle))
        parts += _said(columns[1], middle, 196, reply, mean - group, f"worth {mean:g}, the mean of its futures")
        for place, (user, answer, reward) in enumerate(futures):
            y = middle - 38 + place * 76
            parts.append(arrow(columns[1] + 196, middle, columns[2] - 2, y))
            parts += [box(columns[2], y - 21, 120, 42, OTHER), text(user, columns[2] + 60, y + 5, 13)]
            parts.append(arrow(columns[2] + 120, y, columns[3] - 2, y))
            flat = len({value for *_, value in futures}) == 1
            parts += _said(columns[3], y, 204, answer, None if flat else reward - mean)
            parts.append(arrow(columns[3] + 204, y, columns[4] - 2, y))
            parts.append(text(f"{reward:g}", columns[4] + 16, y + 6, 18, weight=600))
    note = "advantage = score − mean of the siblings; if all siblings are worth the same, nothing is learned"
    parts.append(text(note, 16, 388, 13, SOFT, "start"))
    return picture(900, 404, parts)


def draw_sizes() -> str:
    """One recipe from a laptop to many machines."""
    wide, gap, left, top = 252, 22, 16, 22
    parts = []
    for number, (title, command, lines, gpus, machines) in enumerate(SIZES):
        x = left + number * (wide + gap)
        middle = x + wide / 2
        parts.append(box(x, top, wide, 176, OTHER))
        parts.append(text(title, middle, top + 28, 17, weight=600))
        parts += _machines(middle, top + 44, gpus, machines)
        parts.append(text(command, middle, top + 118, 12, INK))
        parts += [text(line, middle, top + 140 + 18 * place, 12, SOFT) for place, line in enumerate(lines)]
        if number:
            parts.append(arrow(x - gap, top + 88, x - 2, top + 88))
    return picture(left * 2 + 4 * wide + 3 * gap, 216, parts)


def _machines(middle: float, top: float, gpus: int, machines: int) -> list[str]:
    """Machines side by side, their GPUs inside; a machine without one is empty."""
    wide, gap = (84 if gpus > 1 else 64) if machines == 1 else 68, 8
    start = middle - (machines * wide + (machines - 1) * gap) / 2
    parts = []
    for number in range(machines):
        x = start + number * (wide + gap)
        parts.append(box(x, top, wide, 48, PAPER, INK))
        size = (wide - 12) / max(gpus, 1) - 4
        side = min(size, 28)
        first = x + wide / 2 - (gpus * (side + 4) - 4) / 2
        parts += [box(first + place * (side + 4), top + 24 - side / 2, side, side, POLICY, UP) for place in range(gpus)]
    return parts


def _said(x: float, middle: float, wide: float, words: str, advantage: float | None, below: str = "") -> list[str]:
    """What the policy said, its advantage at the right; green where it is to be said more often."""
    edge = LINE if advantage is None else UP if advantage > 0 else DOWN
    parts = [box(x, middle - 24, wide, 48, POLICY, edge, 1.2 if advantage is None else 2.4)]
    parts.append(text(words, x + 10, middle + 5, 13, anchor="start"))
    shown = "±0" if advantage is None else f"{advantage:+.2f}".replace("-", "−")
    parts.append(text(shown, x + wide - 10, middle + 5, 14, SOFT if advantage is None else edge, "end", 600))
    return [*parts, text(below, x, middle + 42, 12, SOFT, "start")] if below else parts


if __name__ == "__main__":
    (DOCS / "loop.svg").write_text(draw_loop())
    (DOCS / "tree.svg").write_text(draw_tree())
    (DOCS / "sizes.svg").write_text(draw_sizes())
    sys.exit(0)
