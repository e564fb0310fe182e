"""Tables and pictures of docs/results.md on estimators and credit, and on TRL beside us, from docs/results/.

    python docs/draw_results.py          # calls this file; writes the pictures and prints the tables

`results/estimators/evaluations.csv` has one line per run and evaluation: the share of correct answers and of questions
by kind of opening, on 200 held-out problems. `results/estimators/pull.csv` has what the training replies of ten steps
say, by run and kind of opening: how often they ask, how much the advantages favour asking (`to_ask`, the covariance of
advantage and asking within a group), and how often an answer is right at once and after a question.
`results/trl/*.jsonl` has one line per step.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parent
RUNS = DOCS / "results"
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's t for a 95 % interval of the mean, by number of runs."""
ESTIMATORS = {"grpo": "`grpo`", "drgrpo": "`dr-grpo`", "rloo": "`rloo`", "ppo": "PPO"}
"""Those of the pictures and of README."""
ALL = {**ESTIMATORS, "gdpo": "`gdpo`"}
LAST = 240
KINDS = ("ambiguous", "unambiguous")
Curves = dict[str, dict[int, float]]
"""By run: a value by step."""
Key = tuple[str, str]
"""Estimator and credit."""


def read_evaluations() -> dict[Key, dict[str, dict[int, dict[str, float]]]]:
    """By estimator and credit, then seed, then step: the columns."""
    runs: dict[Key, dict[str, dict[int, dict[str, float]]]] = defaultdict(lambda: defaultdict(dict))
    with (RUNS / "estimators" / "evaluations.csv").open() as lines:
        for line in csv.DictReader(lines):
            key = line.pop("estimator"), line.pop("credit")
            seed, step = line.pop("seed"), int(line.pop("step"))
            runs[key][seed][step] = {name: float(value) for name, value in line.items()}
    return runs


def read_pull(estimator: str, credit: str, opening: str, column: str) -> Curves:
    """One column of the training replies, by seed and by the middle of its ten steps."""
    curves: Curves = defaultdict(dict)
    with (RUNS / "estimators" / "pull.csv").open() as lines:
        for line in csv.DictReader(lines):
            if (line["estimator"], line["credit"], line["opening"]) == (estimator, credit, opening) and line[column]:
                curves[line["seed"]][int(line["first_step"]) + 5] = float(line[column])
    return curves


def interval(values: Sequence[float], sign: str = "") -> str:
    """Mean ± half of the 95 % interval of the mean."""
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):{sign}.2f} ± {half:.2f}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def lowest(run: Mapping[int, Mapping[str, float]], column: str) -> float:
    """The worst evaluation from step 40 on."""
    return min(line[column] for step, line in run.items() if step >= 40)


def estimator_table() -> str:
    """Estimator by credit: correct answers at the end and at worst, and questions."""
    runs = read_evaluations()
    head = ["estimator", "credit", *KINDS, *(f"worst {kind}" for kind in KINDS), *(f"asks, {kind}" for kind in KINDS)]
    start = [run[0] for run in runs["grpo", "tree"].values()]
    first = ["after SFT", "", *(interval([line[kind] for line in start]) for kind in KINDS), "", ""]
    rows = [head, [*first, *(_range([line[f"asks_{kind}"] for line in start]) for kind in KINDS)]]
    for estimator, label in ALL.items():
        for credit in ("reply", "tree"):
            seeds = list(runs[estimator, credit].values())
            row = [label, "**tree**" if credit == "tree" else credit]
            row += [interval([run[LAST][kind] for run in seeds]) for kind in KINDS]
            row += [interval([lowest(run, kind) for run in seeds]) for kind in KINDS]
            row += [_range([run[LAST][f"asks_{kind}"] for run in seeds]) for kind in KINDS]
            rows.append(row)
    return markdown(rows)


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def difference_table() -> str:
    """Tree minus reply, paired by seed."""
    runs = read_evaluations()
    head = ["estimator", *(f"{kind} at step {LAST}" for kind in KINDS), *(f"{kind}, worst" for kind in KINDS)]
    rows = [head]
    for estimator, label in ALL.items():
        reply, tree = runs[estimator, "reply"], runs[estimator, "tree"]
        row = [label]
        row += [interval([tree[seed][LAST][kind] - reply[seed][LAST][kind] for seed in reply], "+") for kind in KINDS]
        row += [
            interval([lowest(tree[seed], kind) - lowest(reply[seed], kind) for seed in reply], "+") for kind in KINDS
        ]
        rows.append(row)
    return markdown(rows)


def figures_of(run: Mapping[int, Mapping[str, float]], last: int = LAST) -> dict[str, float]:
    """What of a run is compared with a row: both kinds of opening, at the end and at worst."""
    ends = {f"{kind} at step {last}": run[last][kind] for kind in KINDS}
    return ends | {f"{kind}, worst": lowest(run, kind) for kind in KINDS}


def expected(values: Sequence[float]) -> tuple[float, float]:
    """Where a single new run is expected with 95 % probability, rounded outwards to what the page shows."""
    half = T_95[len(values)] * statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
    mean = statistics.fmean(values)
    return math.floor(100 * max(mean - half, 0)) / 100, math.ceil(100 * min(mean + half, 1)) / 100


def left_out() -> str:
    """Is `expected` right? Each seed of each row beside what the other four expect; 95 % should be inside."""
    inside, figures = 0, 0
    for key in ((estimator, credit) for estimator in ALL for credit in ("reply", "tree")):
        row = {seed: figures_of(run) for seed, run in read_evaluations()[key].items()}
        for seed, run in row.items():
            others = [each for other, each in row.items() if other != seed]
            for name, figure in run.items():
                low, high = expected([each[name] for each in others])
                inside, figures = inside + (low <= round(figure, 2) <= high), figures + 1
    return f"{inside} of {figures} figures"


def claim_table() -> str:
    """The same in short, for README: correct answers by credit, the paired difference, needless questions."""
    runs = read_evaluations()
    head = ["estimator", "credit to the reply", "along the tree", "gain, something missing", "gain, nothing missing"]
    rows = [[*head, "asks when nothing is missing (tree)"]]
    for estimator, label in ESTIMATORS.items():
        reply, tree = runs[estimator, "reply"], runs[estimator, "tree"]

        def correct(seeds: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
            return " / ".join(f"{statistics.fmean(run[LAST][kind] for run in seeds.values()):.2f}" for kind in KINDS)

        gains = [interval([tree[seed][LAST][kind] - reply[seed][LAST][kind] for seed in reply], "+") for kind in KINDS]
        asks = _range([run[LAST]["asks_unambiguous"] for run in tree.values()])
        rows.append([label, correct(reply), correct(tree), *gains, asks])
    return markdown(rows)


OPENINGS = {"ambiguous": 136, "unambiguous": 64}
"""Problems of an evaluation, by kind."""


def choice_table() -> str:
    """The candidates for the recipe's default, along the tree: correct answers, and questions that were needless."""
    runs, problems = read_evaluations(), sum(OPENINGS.values())

    def figures(line: Mapping[str, float]) -> list[float]:
        correct = [line[kind] for kind in OPENINGS]
        everywhere = sum(line[kind] * count for kind, count in OPENINGS.items()) / problems
        return [*correct, everywhere, line["asks_unambiguous"] * OPENINGS["unambiguous"] / problems]

    head = ["along the tree", *(f"correct, {kind}" for kind in OPENINGS), "correct, all problems", "asks needlessly"]
    rows = [head]
    ends = {name: {seed: figures(run[LAST]) for seed, run in runs[name, "tree"].items()} for name in ("grpo", "drgrpo")}
    for name, seeds in ends.items():
        rows.append([ESTIMATORS[name], *(interval(values) for values in zip(*seeds.values(), strict=True))])
    gaps = [[b - a for a, b in zip(ends["grpo"][seed], ends["drgrpo"][seed], strict=True)] for seed in ends["grpo"]]
    gains = (interval(values, "+") for values in zip(*gaps, strict=True))
    return markdown([*rows, ["`dr-grpo` minus `grpo`", *gains]])


STAGES = ((1, "1 to 10"), (31, "31 to 40"), (71, "71 to 80"), (111, "111 to 120"), (231, "231 to 240"))


def pull_table() -> str:
    """What training replies did over the steps, for one estimator with the division and one without."""
    head = ["estimator, credit", "steps", "asks", "pull towards asking", "right after asking", "asks again"]
    rows = [[*head[:2], *(f"{name}, {short}" for name in head[2:4] for short in ("amb.", "unamb.")), *head[4:]]]
    for estimator, credit in (("grpo", "reply"), ("grpo", "tree"), ("drgrpo", "reply"), ("drgrpo", "tree")):
        for first, label in STAGES:
            cells = [(column, kind) for column in ("asks", "to_ask") for kind in KINDS]
            cells += [("right_after_asking", "ambiguous"), ("asks_again", "ambiguous")]
            row = [f"{ESTIMATORS[estimator]}, {credit}", label]
            for column, kind in cells:
                values = [run[first + 5] for run in read_pull(estimator, credit, kind, column).values()]
                row.append(f"{statistics.fmean(values):{'+.3f' if column == 'to_ask' else '.2f'}}")
            rows.append(row)
    return markdown(rows)


REPLY, TREE = ("#b4532a", "credit to the reply (as published)"), ("#1f6f5c", "credit along the tree")
AMBIGUOUS, CLEAR = ("#3d5a9c", "a number is withheld"), ("#8a6d1d", "nothing is withheld")
Style = tuple[str, str]


def polyline(points: Sequence[tuple[float, float]], style: str) -> str:
    """A line through points."""
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" {style}/>'


def panel(
    place: tuple[int, int, int, int],
    title: str,
    curves: Sequence[tuple[Style, Curves]],
    bounds: tuple[float, float],
    ticks: tuple[Sequence[float], Sequence[float]],
) -> list[str]:
    """A panel at (left, top, width, height): a thin line per run, a thick one for their mean."""
    left, top, wide, high = place
    low, upper = bounds
    end = ticks[0][-1]

    def at(step: float, value: float) -> tuple[float, float]:
        return left + wide * step / end, top + high * (upper - min(max(value, low), upper)) / (upper - low)

    out = [f'<text x="{left}" y="{top - 9}" fill="#222" font-weight="600">{title}</text>']
    for value in ticks[1]:
        y = at(0, value)[1]
        out.append(f'<path d="M{left} {y:.1f}h{wide}" stroke="{"#999" if value == 0 else "#ddd"}"/>')
        out.append(f'<text x="{left - 6}" y="{y + 5:.1f}" text-anchor="end" fill="#555">{value:g}</text>')
    for step in ticks[0]:
        out.append(
            f'<text x="{at(step, 0)[0]:.1f}" y="{top + high + 19}" text-anchor="middle" fill="#555">{step:g}</text>'
        )
    for (colour, _), runs in curves:
        thin = f'stroke="{colour}" stroke-opacity=".3"'
        out += [polyline([at(*point) for point in sorted(run.items())], thin) for run in runs.values()]
        shared = sorted(set.intersection(*(set(run) for run in runs.values())))
        mean = [at(step, statistics.fmean(run[step] for run in runs.values())) for step in shared]
        out.append(polyline(mean, f'stroke="{colour}" stroke-width="3"'))
    return out


def frame(wide: int, high: int, styles: Sequence[Style], caption: str, body: Sequence[str]) -> str:
    """The picture around the panels: what the colours mean, and a line below."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        f'<rect width="{wide}" height="{high}" fill="#fff"/>',
    ]
    for number, (colour, label) in enumerate(styles):
        x = 52 + number * 300
        parts.append(f'<path d="M{x} 22h26" stroke="{colour}" stroke-width="4"/>')
        parts.append(f'<text x="{x + 34}" y="27" fill="#222">{label}</text>')
    parts += [*body, f'<text x="{wide / 2}" y="{high - 10}" text-anchor="middle" fill="#555">{caption}</text></svg>']
    return "\n".join(parts) + "\n"


STEPS = (0, 80, 160, 240)
QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


def draw_credit() -> str:
    """Correct answers over steps: a column per estimator, a row per kind of opening, both credits in each panel."""
    runs = read_evaluations()
    body: list[str] = []
    for row, (kind, (_, what)) in enumerate(zip(KINDS, (AMBIGUOUS, CLEAR), strict=True)):
        top = 96 + row * 246
        body.append(f'<text x="490" y="{top - 32}" text-anchor="middle" fill="#222">problems in which {what}</text>')
        for column, (estimator, label) in enumerate(ESTIMATORS.items()):
            curves = [
                (style, {seed: {step: line[kind] for step, line in run.items()} for seed, run in seeds.items()})
                for style, seeds in ((REPLY, runs[estimator, "reply"]), (TREE, runs[estimator, "tree"]))
            ]
            place = (52 + column * 234, top, 190, 170)
            body += panel(place, label.strip("`"), curves, (0.0, 1.0), (STEPS, QUARTERS))
    caption = "step; share of correct answers to held-out word problems, SmolLM2-135M, five seeds (thin) and their mean"
    return frame(980, 566, (REPLY, TREE), caption, body)


def draw_pull() -> str:
    """How much the advantages favour asking, and how often the policy asks, by kind of opening."""
    body: list[str] = []
    scales = {"grpo": ((-0.3, 0.3), (-0.3, 0.0, 0.3)), "drgrpo": ((-0.15, 0.15), (-0.15, 0.0, 0.15))}
    for row, (column, what) in enumerate((("to_ask", "pull towards asking"), ("asks", "share that asks"))):
        for place, estimator in enumerate(scales):
            curves = [
                (style, read_pull(estimator, "tree", kind, column))
                for kind, style in zip(KINDS, (AMBIGUOUS, CLEAR), strict=True)
            ]
            bounds, ticks = scales[estimator] if column == "to_ask" else ((0.0, 1.0), QUARTERS)
            title = f"{ESTIMATORS[estimator].strip('`')}: {what}"
            body += panel((62 + place * 470, 74 + row * 236, 420, 170), title, curves, bounds, (STEPS, ticks))
    caption = "step; replies sampled in training along the tree, five seeds (thin) and their mean"
    return frame(980, 536, (AMBIGUOUS, CLEAR), caption, body)


OURS, PEER = ("#1f6f5c", "Upshot"), ("#b4532a", "TRL 1.16")
WINDOW = 10


def read_learning(way: str, along: str) -> Curves:
    """Reward as the mean of ten steps, by seed; `along` is what the steps are counted in."""
    curves: Curves = {}
    for seed in ("1", "2", "3"):
        steps = [json.loads(line) for line in (RUNS / "trl" / f"{way}-{seed}.jsonl").read_text().splitlines()]
        blocks = [steps[first : first + WINDOW] for first in range(0, len(steps), WINDOW)]
        curves[seed] = {block[-1][along]: statistics.fmean(step["reward"] for step in block) for block in blocks}
    return curves


def band(colour: str, runs: Curves, at: Callable[[float, float], str]) -> str:
    """What lies between the lowest and the highest seed."""
    steps = sorted(next(iter(runs.values())))
    upper = [at(step, max(run[step] for run in runs.values())) for step in steps]
    lower = [at(step, min(run[step] for run in runs.values())) for step in reversed(steps)]
    return f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" fill-opacity=".14"/>'


def draw_learning() -> str:
    """TRL and ours: reward over steps with the bands of three seeds, and over seconds seed by seed."""
    place = (52, 74, 410, 260)
    styles = ((PEER, "trl"), (OURS, "ours"))
    steps = [(style, read_learning(way, "step")) for style, way in styles]
    seconds = [(style, _by_mean_time(way)) for style, way in styles]

    def at(step: float, value: float) -> str:
        return f"{place[0] + place[2] * step / 100:.1f},{place[1] + place[3] * (0.8 - value) / 0.6:.1f}"

    body = [band(style[0], runs, at) for style, runs in steps]
    bounds, ticks = (0.2, 0.8), (0.2, 0.4, 0.6, 0.8)
    body += panel(place, "over steps", steps, bounds, ((0, 25, 50, 75, 100), ticks))
    body += panel((532, 74, 410, 260), "over seconds", seconds, bounds, ((0, 60, 120, 180, 240), ticks))
    caption = "reward, mean of ten steps, three seeds; the runs shared one H200 with others: seconds are a rough guide"
    return frame(980, 390, (OURS, PEER), caption, body)


def _by_mean_time(way: str) -> Curves:
    """The mean over seeds of reward and of seconds, as one run."""
    times = [list(run) for run in read_learning(way, "seconds").values()]
    rewards = [list(run.values()) for run in read_learning(way, "seconds").values()]
    mean_time = [statistics.fmean(values) for values in zip(*times, strict=True)]
    return {"mean": dict(zip(mean_time, map(statistics.fmean, zip(*rewards, strict=True)), strict=True))}


def learning_table() -> str:
    """TRL and ours in blocks of ten steps, lowest to highest of three seeds, and the time of the whole run."""
    blocks = (10, 20, 30, 50, 70, 100)
    rows = [["", *(f"steps {step - 9} to {step}" for step in blocks), "seconds for 100 steps"]]
    for way, label in (("ours", OURS[1]), ("trl", PEER[1])):
        runs, times = read_learning(way, "step"), read_learning(way, "seconds")
        seconds = [max(run) for run in times.values()]
        row = [_range([run[step] for run in runs.values()]) for step in blocks]
        rows.append([label, *row, f"{min(seconds):.0f} to {max(seconds):.0f}"])
    return markdown(rows)


PICTURES = {"fall-and-hold.svg": draw_credit, "pull.svg": draw_pull, "trl-learn.svg": draw_learning}
TABLES = (claim_table, estimator_table, left_out, difference_table, choice_table, pull_table, learning_table)


def main() -> None:
    """Draw and print."""
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw())
    print(*(table() for table in TABLES), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
