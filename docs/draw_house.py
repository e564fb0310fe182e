"""Draws docs/house.svg: the rooms of the package as boxes, their imports as arrows, from the code as it is.

    python docs/draw_house.py

An arrow that others imply (cli → core, where cli → run → core) is left out; a box's area grows with its lines.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BANDS = [
    ("you call", ["verl", "cli", "offline", "api"]),
    ("a run", ["run", "training"]),
    ("a step", ["rollout", "rewards", "tasks"]),
    ("machines", ["serving", "models", "engine", "sandbox"]),
    ("ground", ["config", "core"]),
]
CAPTIONS = {
    "cli": "one file per verb",
    "verl": "recipes on a cluster",
    "offline": "score, verify, eval, judge, data",
    "api": "reward, load, train",
    "run": "folder, checkpoints, resume, report",
    "training": "loops, objectives, learner",
    "rollout": "episode, futures",
    "rewards": "metrics, credit, advantages",
    "tasks": "rows, participants, verifiers",
    "serving": "servers, OpenAI API, vLLM, swap",
    "models": "text from a model",
    "engine": "pages, batching, all kernels",
    "sandbox": "untrusted programs",
    "config": "recipe, overrides, registry",
    "core": "conversation, score, files, http",
}
WIDTH, BAND, TOP, LEFT = 1180, 132, 20, 110
INK, SOFT, LINE, FILLS = "#1f2937", "#6b7280", "#94a3b8", ["#eef2ff", "#ecfeff", "#f0fdf4", "#fffbeb", "#f8fafc"]


def room_of(module: str) -> str:
    """The room that a module is in; '' for the package's own face."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / "upshot" / parts[1]).is_dir() else ""


def measure() -> tuple[dict[str, int], dict[str, set[str]]]:
    """Lines of every room, and the rooms that it imports, at any depth of its files."""
    lines: dict[str, int] = defaultdict(int)
    arrows: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "upshot").rglob("*.py")):
        own = room_of(".".join(path.relative_to(ROOT).parts))
        text = path.read_text()
        if not own:
            continue
        lines[own] += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("upshot."):
                arrows[own].add(room_of(node.module or ""))
    return lines, {room: others - {room, ""} for room, others in arrows.items()}


def reduce(arrows: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that no way over another room implies."""

    def reach(room: str) -> set[str]:
        seen: set[str] = set()
        todo = [*arrows.get(room, ())]
        while todo:
            if (at := todo.pop()) not in seen:
                seen.add(at)
                todo += arrows.get(at, ())
        return seen

    return sorted(
        (a, b) for a, others in arrows.items() for b in others if not any(b in reach(c) for c in others - {b})
    )


def places(lines: dict[str, int]) -> dict[str, tuple[float, float, float, float]]:
    """x, y, width and height of every box: bands from top to bottom, widths by lines."""
    out = {}
    for number, (_, rooms) in enumerate(BANDS):
        gap = 46.0
        space = WIDTH - LEFT - 30 - gap * (len(rooms) - 1)
        weights = [max(lines[room], 1) ** 0.5 + 45 for room in rooms]
        scale = min(space / sum(weights), 1.75)
        x = LEFT + (WIDTH - LEFT - 30 - scale * sum(weights) - gap * (len(rooms) - 1)) / 2
        for room, weight in zip(rooms, weights, strict=True):
            out[room] = (x, TOP + number * BAND + 14, weight * scale, 74.0)
            x += weight * scale + gap
    return out


def write(text: str, x: float, y: float, size: int, ink: str = SOFT, anchor: str = "middle") -> str:
    """A line of text."""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}" fill="{ink}">{text}</text>'


def draw(lines: dict[str, int], arrows: dict[str, set[str]]) -> str:
    """The picture."""
    boxes = places(lines)
    height = TOP + BAND * len(BANDS)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker></defs>',
    ]
    for number, (name, _) in enumerate(BANDS):
        y = TOP + number * BAND
        out.append(f'<rect x="8" y="{y}" width="{WIDTH - 16}" height="{BAND - 28}" rx="10" fill="{FILLS[number]}"/>')
        out.append(f'<text x="22" y="{y + 56}" font-size="15" fill="{SOFT}">{name}</text>')
    for a, b in reduce(arrows):
        (ax, ay, aw, ah), (bx, by, bw, _) = boxes[a], boxes[b]
        if ay == by:  # neighbours on one floor
            right = ax < bx
            x1, x2, y = (ax + aw if right else ax), (bx if right else bx + bw), ay + ah / 2
            path = f"M{x1:.0f} {y:.0f}L{x2:.0f} {y:.0f}"
        else:
            x1, x2 = ax + aw / 2, bx + bw / 2
            x1 += max(-aw / 3, min(aw / 3, (x2 - x1) / 4))
            x2 += max(-bw / 3, min(bw / 3, (x1 - x2) / 4))
            bend = (by - ay - ah) / 2
            path = f"M{x1:.0f} {ay + ah:.0f}C{x1:.0f} {ay + ah + bend:.0f} {x2:.0f} {by - bend:.0f} {x2:.0f} {by:.0f}"
        out.append(f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.4" marker-end="url(#tip)"/>')
    for room, (x, y, w, h) in boxes.items():
        middle = x + w / 2
        out.append(f'<rect x="{x:.0f}" y="{y}" width="{w:.0f}" height="{h}" rx="8" fill="white" stroke="{INK}"/>')
        out.append(write(room, middle, y + 28, 17, INK))
        words = CAPTIONS[room].split(", ")
        half = (len(words) + 1) // 2 if len(CAPTIONS[room]) * 6 > w else len(words)
        for n, part in enumerate(filter(None, [", ".join(words[:half]), ", ".join(words[half:])])):
            out.append(write(part, middle, y + 45 + 13 * n, 11))
        out.append(write(f"{lines[room] / 1000:.1f}k", x + w - 6, y + 14, 10, anchor="end"))
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "house.svg"
    target.write_text(draw(*measure()))
    print(target)
