"""`upshot replay RUN STEP`: score the replies of a finished step again, and show old and new side by side."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from upshot.offline.replay import ScoreChange


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "replay",
        help="score a step's replies again, from the run's files",
        description="Score the replies of a finished step again with the recipe's reward, from rollouts.jsonl: nothing "
        "is sampled of the policy. For a metric, verifier or judge that was changed: key=value overrides the recipe.",
    )
    parser.add_argument("folder", metavar="RUN", help="a run folder")
    parser.add_argument("step", metavar="STEP", type=int, help="a step of it, counted from 1")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="such as models.judge=URL#name reward.metrics=…"
    )
    parser.add_argument("--changed", action="store_true", help="show only what is not as it was")
    parser.add_argument("--json", action="store_true", help="a line of JSON per number")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay and print; 0 when everything is as it was, 1 when something is not."""
    import asyncio
    from pathlib import Path

    from upshot.config.load import load_recipe
    from upshot.offline.replay import replay
    from upshot.run.folder import RunFolder

    folder = RunFolder.open(Path(args.folder))
    recipe = load_recipe(str(folder.path / "recipe.yaml"), args.overrides).recipe
    found = asyncio.run(replay(folder, recipe, args.step))
    listed = [one for one in found if not (args.changed and one.same)]
    if args.json:
        _print_json(listed)
    else:
        _print_table(listed, found)
    return 0 if all(one.same for one in found) else 1


def _print_json(listed: Sequence[ScoreChange]) -> None:
    import json

    for one in listed:
        row = {"key": one.key, "what": one.what, "old": one.old.to_dict(), "new": one.new.to_dict(), "same": one.same}
        print(json.dumps(row, default=str))


def _print_table(listed: Sequence[ScoreChange], found: Sequence[ScoreChange]) -> None:
    wide = max((len(one.key) for one in listed), default=0)
    name = max((len(one.what) for one in listed), default=0)
    if listed:
        print(f"{'reply':<{wide}}  {'':<{name}}  {'old':>12}  {'new':>12}")
    for one in listed:
        print(f"{one.key:<{wide}}  {one.what:<{name}}  {_told(one.old):>12}  {_told(one.new):>12}{_mark(one)}")
    changed = sum(not one.same for one in found)
    replies = len({one.key for one in found})
    print(
        f"{replies} replies, {len(found)} numbers: "
        + (f"{changed} are not as they were" if changed else "all as they were")
    )


def _told(score: object) -> str:
    value = getattr(score, "value", None)
    return f"{value:.4g}" if value is not None else f"– {getattr(score, 'reason', '')}"


def _mark(one: ScoreChange) -> str:
    return "" if one.same else "  changed"
