# ruff: noqa: E501 (the programs are one line each)
"""Verdicts on programs, measured on four public sets: references, mutants that must fail, honest programs that must pass.

    python benchmarks/verdicts.py FOLDER                 # every set in the folder
    python benchmarks/verdicts.py FOLDER --only mbpp --variants 300

FOLDER holds any of HumanEval.jsonl.gz, mbpp.jsonl, classeval.json and bigcodebench.jsonl.gz; none of them ships with the
project. Of BigCodeBench, only the rows that need nothing but the standard library and numpy are used.

- *profiles*: how many rows the judge can decide, and what the reference scores.
- *mutants*: three of each reference (a wrong constant, off by one, an early return). If one fails in the plain run, it
  must score 0.
- *variants*: each reference rewritten so that it computes the same in a different way (loops instead of comprehensions,
  classes instead of functions and lists, generators, hand-written iterators, numpy numbers). If one passes in the plain
  run, it must score 1.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import copy
import gzip
import json
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from upshot.sandbox import Outcome, Sandbox
from upshot.tasks.verifiers.base import verifiers
from upshot.tasks.verifiers.code import share_passed
from upshot.tasks.verifiers.profile import CheckKind, RowChecks, RowProfile, decide
from upshot.tasks.verifiers.profile_store import Verdicts

FILES = {
    "humaneval": "HumanEval.jsonl.gz",
    "code": "mbpp.jsonl",
    "classeval": "classeval.json",
    "bigcodebench": "bigcodebench.jsonl.gz",
}
"""By the name of the verifier."""
PLAIN_MODULES = {*sys.stdlib_module_names, "numpy"}


def read_rows(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """The rows of a set; none where the folder has no such file."""
    path = folder / FILES[name]
    if not path.exists():
        return
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    for row in json.loads(text) if path.suffix == ".json" else map(json.loads, filter(None, text.split("\n"))):
        libraries = row.get("libs") or []
        names = ast.literal_eval(libraries) if isinstance(libraries, str) else libraries
        if {library.partition(".")[0] for library in names} <= PLAIN_MODULES:
            yield {**row, "stub": row.get("prompt", "")} if name == "humaneval" else row


class _Change(ast.NodeTransformer):
    """Changes one place: the first of its kind."""

    def __init__(self, kind: type[ast.AST], change: Callable[[Any], Any]) -> None:
        self.kind, self.change, self.done = kind, change, False

    def visit(self, node: ast.AST) -> Any:
        """The node, changed where it is the first that can be."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return node  # a docstring
        if not self.done and isinstance(node, self.kind) and (made := self.change(copy.deepcopy(node))) is not None:
            self.done = True
            return made
        return super().visit(node)


def _other_constant(node: ast.Constant) -> ast.Constant | None:
    if isinstance(node.value, str):
        return ast.Constant(node.value + "?") if node.value else None
    return ast.Constant(node.value + 3) if type(node.value) in (int, float) else None


def _off_by_one(node: ast.Return) -> ast.Return | None:
    if node.value is None:
        return None
    shifted = "(lambda r: r + 1 if type(r) in (int, float) else r[1:] if type(r) in (list, str, tuple) else not r)"
    return ast.Return(ast.Call(ast.parse(shifted, mode="eval").body, [node.value], []))


def _early_return(node: ast.FunctionDef) -> ast.FunctionDef:
    node.body.insert(0, ast.Return(ast.Constant(None)))
    return node


MUTATIONS: dict[str, tuple[type[ast.AST], Callable[[Any], Any]]] = {
    "wrong constant": (ast.Constant, _other_constant),
    "off by one": (ast.Return, _off_by_one),
    "early return": (ast.FunctionDef, _early_return),
}


def mutate(program: str) -> Iterator[tuple[str, str]]:
    """Wrong programs made of a right one."""
    for name, (kind, change) in MUTATIONS.items():
        changer = _Change(kind, change)
        tree = changer.visit(ast.parse(program))
        if changer.done:
            yield name, ast.unparse(ast.fix_missing_locations(tree))


class _Loops(ast.NodeTransformer):
    """List comprehensions as functions with a loop."""

    def visit_ListComp(self, node: ast.ListComp) -> Any:
        """The call of such a function, made on the spot by a lambda over a generator of one loop."""
        self.generic_visit(node)
        if len(node.generators) > 1 or node.generators[0].is_async:
            return node
        return ast.Call(ast.parse("_by_loop", mode="eval").body, [ast.GeneratorExp(node.elt, node.generators)], [])


class _Conditions(ast.NodeTransformer):
    """`return a if c else b` as two returns."""

    def visit_Return(self, node: ast.Return) -> Any:
        """The statement, or an if."""
        if isinstance(node.value, ast.IfExp):
            value = node.value
            return ast.If(value.test, [ast.Return(value.body)], [ast.Return(value.orelse)])
        return node


class _Iterators(ast.NodeTransformer):
    """`for x in xs` as a loop over an iterator that is asked by hand."""

    def visit_For(self, node: ast.For) -> Any:
        """The loop over a generator that asks."""
        self.generic_visit(node)
        node.iter = ast.Call(ast.Name("_by_hand", ast.Load()), [node.iter], [])
        return node


HELPERS = """
def _by_loop(items):
    found = []
    for item in items:
        found.append(item)
    return found
def _by_hand(items):
    iterator = iter(items)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item
"""
WRAPPERS = {
    "object": "class _Solver:\n    def __init__(self, run): self.run = run\n    def __call__(self, *a, **k): return self.run(*a, **k)\n{f} = _Solver({f})",
    "wrapped": "import functools as _functools\ndef _traced(run):\n    @_functools.wraps(run)\n    def call(*a, **k): return run(*a, **k)\n    return call\n{f} = _traced({f})",
    "subclass": "class _Rows(list): pass\nclass _Pair(tuple): pass\nclass _Table(dict): pass\n_inner = {f}\ndef {f}(*a, **k):\n    found = _inner(*a, **k)\n    kinds = {{list: _Rows, tuple: _Pair, dict: _Table}}\n    return kinds[type(found)](found) if type(found) in kinds else found",
    "generator": "_inner = {f}\ndef {f}(*a, **k):\n    found = _inner(*a, **k)\n    def each(): yield from found\n    return list(each()) if type(found) is list else found",
    "numpy": "import numpy as _np\n_inner = {f}\ndef {f}(*a, **k):\n    found = _inner(*a, **k)\n    if type(found) is int and abs(found) < 2 ** 62: return _np.int64(found)\n    if type(found) is float: return _np.float64(found)\n    if type(found) is list and found and all(type(x) is int and abs(x) < 2 ** 62 for x in found): return _np.array(found).tolist()\n    return found",
    "memo": "_inner, _seen = {f}, {{}}\ndef {f}(*a, **k):\n    key = repr((a, k))\n    if key not in _seen: _seen[key] = _inner(*a, **k)\n    return _seen[key]",
}  # fmt: skip
REWRITES: dict[str, type[ast.NodeTransformer]] = {"loops": _Loops, "conditions": _Conditions, "iterators": _Iterators}


def vary(program: str, function: str | None) -> Iterator[tuple[str, str]]:
    """Programs that compute the same; those around a function where there is one to call."""
    whole = ast.unparse(ast.parse(program))
    for name, rewrite in REWRITES.items():
        tree = ast.fix_missing_locations(rewrite().visit(ast.parse(program)))
        if ast.unparse(tree) != whole:
            yield name, f"{HELPERS}\n{ast.unparse(tree)}" if name != "conditions" else ast.unparse(tree)
    for name, text in WRAPPERS.items() if function else ():
        yield name, f"{program}\n\n{text.format(f=function)}"


def function_of(program: str, checks: RowChecks, row: dict[str, Any]) -> str | None:
    """The function that the tests call; None where they call a class."""
    if row.get("entry_point"):
        return str(row["entry_point"])
    defined = [node.name for node in ast.parse(program).body if isinstance(node, ast.FunctionDef)]
    return next((name for name in defined if any(f"{name}(" in str(test) for test in checks.tests)), None)


class Measurement:
    """One set: its rows, their profiles, and what programs score."""

    def __init__(self, name: str, folder: Path, sandbox: Sandbox) -> None:
        self.name = name
        self.verdicts = Verdicts(file=folder / f".{name}-profiles")
        verifier: Any = verifiers.create(name, {}, sandbox=sandbox)
        self.rows = [
            (row, verifier.checks(row.get("test") or row.get("test_list"), row)) for row in read_rows(folder, name)
        ]
        self.profiles: list[RowProfile] = []

    async def profile(self) -> None:
        """Measure the references, and print what the judge can decide and what they score."""
        self.profiles = await each(self.rows, lambda pair: self.verdicts.profile(pair[1]))
        sums = Counter(profile.summary for profile in self.profiles)
        passing = [(row, checks) for (row, checks), profile in self.paired if profile.summary != "broken"]
        scores = await each(passing, lambda pair: self.score(pair[1], str(pair[1].reference)))
        right = sum(score == 1 for score, _ in scores)
        kinds = Counter(kind for profile in self.profiles for kind in profile.kinds)
        print(
            f"{self.name:<13} {len(self.rows):>5} rows: {sums['decidable']} decidable, {sums['partly']} partly, "
            f"{sums['believed']} believed, {sums['broken']} broken; reference scores 1 on {right} of {len(passing)} "
            f"({dict(kinds)})",
            flush=True,
        )
        for (row, _), (score, outcomes) in zip(passing, scores, strict=True):
            if score != 1:
                print(f"  reference of {row.get('task_id')}: {score} {dict(outcomes)}", flush=True)

    @property
    def paired(self) -> list[tuple[tuple[dict[str, Any], RowChecks], RowProfile]]:
        """Rows with their profiles."""
        return list(zip(self.rows, self.profiles, strict=True))

    async def score(self, checks: RowChecks, program: str) -> tuple[float | None, Counter[str]]:
        """What a program gets, all or nothing, and the outcomes of its tests in the plain look and the judged one."""
        results = await checks.look(program, checks.limits)
        share = share_passed(decide(results, await self.verdicts.profile(checks)), self.name)
        return None if share.value is None else float(share.value == 1), Counter(str(r.outcome) for r in results)

    def candidates(self, dice: random.Random, most: int, make: Callable[..., Iterator[tuple[str, str]]]) -> list[Any]:
        """(row, checks, kind, program), as many as wanted, in random order."""
        found = []
        for (row, checks), profile in self.paired:
            if checks.reference and any(kind is not CheckKind.BROKEN for kind in profile.kinds):
                arguments = [checks.reference]
                arguments += [function_of(checks.reference, checks, row)] if make is vary else []
                found += [(row, checks, profile, kind, program) for kind, program in make(*arguments)]
        dice.shuffle(found)
        return found[:most]

    async def measure(self, dice: random.Random, most: int, make: Callable[..., Iterator[tuple[str, str]]]) -> None:
        """Score programs made of the references; list those that get what they should not."""
        found = self.candidates(dice, most, make)
        scores = await each(found, lambda one: self.score(one[1], one[4]))
        counts: Counter[str] = Counter()
        wrong = []
        for (row, _, profile, kind, program), (score, outcomes) in zip(found, scores, strict=True):
            kept = {Outcome.PASSED, Outcome.UNCONFIRMED, Outcome.INVALID_TEST}
            broken = sum(one is CheckKind.BROKEN for one in profile.kinds)
            plainly = sum(count for outcome, count in outcomes.items() if outcome not in kept) <= broken
            counts[f"{'passes' if plainly else 'fails'} plainly, scores {score}"] += 1
            if (plainly and score != 1) or (not plainly and score == 1):
                wrong.append((row.get("task_id"), kind, dict(outcomes), program))
        print(f"{self.name:<13} {make.__name__:<7} {len(found)}: {dict(sorted(counts.items()))}", flush=True)
        for name, kind, outcomes, program in wrong:
            print(f"  {name} ({kind}): {outcomes}", flush=True)
            if "-v" in sys.argv:
                print(program, flush=True)


async def each(items: list[Any], work: Callable[[Any], Awaitable[Any]], at_once: int = 4) -> list[Any]:
    """What comes of each, a few at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(item: Any) -> Any:
        async with gate:
            return await work(item)

    return list(await asyncio.gather(*map(one, items)))


async def run(args: argparse.Namespace) -> None:
    """Measure the sets."""
    async with Sandbox(slots=4) as sandbox:
        for name in args.only or FILES:
            found = Measurement(name, args.folder, sandbox)
            if found.rows:
                await found.profile()
                dice = random.Random(args.seed)
                await found.measure(dice, args.mutants, mutate)
                await found.measure(dice, args.variants, vary)


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", choices=FILES)
    parser.add_argument("--mutants", type=int, default=3000, help="most mutants of a set")
    parser.add_argument("--variants", type=int, default=400, help="most variants of a set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-v", action="store_true", help="print the programs that get what they should not")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
