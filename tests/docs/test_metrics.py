"""docs/metrics.md has every key that runs log, and no key that is never logged."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT
from upshot.cli import main

PAGE = (DOCS / "metrics.md").read_text()
FAMILIES = "reward metric part missing rollout tree task by classmate eval loss policy value dpo kto train time"
KEYS = [
    key
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for key in re.findall(r"`([^`]+)`", line.split(" | ")[0])
]
PLACE = re.compile(r"[A-Z]{1,}")
"""Words in capitals stand for names."""

TINY = ("model.tiny={hidden: 16, layers: 1, heads: 2, mlp: 32}", "reward.max_missing=1", "--quiet")
SHORT = ("train.steps=1", "train.prompts_per_step=2", "train.group_size=2", "warm_start.steps=1", "warm_start.batch=4")
HELD_OUT = ("eval.every=1", "eval.rows=2")
RUNS: dict[str, tuple[str, ...]] = {
    "quickstart": ("task.rows_per_split=16", *SHORT, *HELD_OUT),
    "gsm8k-multiturn": ("task.limit=16", "eval.samples=2", "eval.temperature=1", *SHORT, *HELD_OUT),
    "classmate-mini": ("task.limit=16", "models.peer=policy@start", *SHORT, *HELD_OUT),
}
"""Settings that log different keys, with overrides that make them fast."""


def explained(key: str, pages: list[str] = KEYS) -> bool:
    """Whether the page has a key; an evaluation's key may also be explained by the training key."""
    patterns = [re.escape(entry) for entry in pages]
    whole = re.compile("|".join(PLACE.sub(".+", pattern) for pattern in patterns))
    return any(whole.fullmatch(name) for name in {key, key.removeprefix("eval/")})


def test_a_key_missing_from_the_page_would_be_found() -> None:
    assert explained("eval/reward/mean") and explained("by/opening=ambiguous/pass@1")
    assert not explained("reward/median") and not explained("reward/mean", ["reward/missing"])


@pytest.mark.parametrize("recipe", sorted(RUNS))
def test_every_key_that_a_run_logs_is_explained(recipe: str, tmp_path: Path) -> None:
    assert main(["train", recipe, *RUNS[recipe], *TINY, f"run_dir={tmp_path / 'run'}"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = {key for line in lines for key in line} - {"phase", "step"}
    assert len(logged) > 40
    unexplained = sorted(key for key in logged if not explained(key))
    assert unexplained == [], "say in docs/metrics.md what these keys mean"


def keys_in_code() -> Iterator[tuple[str, str]]:
    """Strings in the code that look like keys, each with its file; inserted parts are in CAPITALS.

    A key whose last part is inserted is skipped here; the runs above cover what is logged under it.
    """
    reads_like_one = re.compile(rf"({'|'.join(FAMILIES.split())})/([\w@=]+/)*[a-z_@\d]+")
    for room in ("training", "rollout", "run", "serving/swap"):
        for path in sorted((ROOT / "upshot" / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                key = "".join(str(part.value) if isinstance(part, ast.Constant) else "NAME" for part in parts)
                if reads_like_one.fullmatch(key):
                    yield key, str(path.relative_to(ROOT))


def test_every_key_in_the_code_is_explained() -> None:
    found = dict(keys_in_code())
    assert len(found) > 30
    unexplained = {key: path for key, path in found.items() if not explained(key)}
    assert unexplained == {}, "say in docs/metrics.md what these keys mean"


def test_every_explained_key_is_in_the_code() -> None:
    code = "".join(path.read_text() for path in sorted((ROOT / "upshot").rglob("*.py")))
    names = {key: [part for part in re.split(r"[/@=]", key) if not PLACE.search(part)] for key in KEYS}
    stale = sorted(key for key, parts in names.items() if any(p.removesuffix("_rate") not in code for p in parts))
    assert stale == [], "docs/metrics.md explains keys that nothing logs"
