"""HumanEval's public file: problems as programs and assert tests."""

from __future__ import annotations

import ast
import gzip
import io
from dataclasses import dataclass
from pathlib import Path

from upshot.core.errors import UserError
from upshot.core.files import read_user_jsonl

FIELDS = ("task_id", "prompt", "canonical_solution", "test", "entry_point")


@dataclass(frozen=True)
class HumanEvalProblem:
    """One problem: its parts as published, and its tests split where possible."""

    name: str
    prompt: str
    solution: str
    entry_point: str
    tests: tuple[str, ...]

    def program(self, completion: str) -> str:
        """The program that a completion makes from the prompt."""
        return self.prompt + completion

    @property
    def reference(self) -> str:
        """The published solution as a program."""
        return self.program(self.solution)

    @property
    def given(self) -> str:
        """The part of the prompt before the function: imports and helpers."""
        return self.prompt.split(f"def {self.entry_point}")[0]

    @property
    def stub(self) -> str:
        """The prompt with an empty body: fails every honest test."""
        return self.program("    pass\n")


def load(path: str | Path) -> list[HumanEvalProblem]:
    """Read `HumanEval.jsonl` or `HumanEval.jsonl.gz`."""
    path = Path(path)
    data = path.read_bytes()
    whole = io.BytesIO(gzip.decompress(data) if path.suffix == ".gz" else data)
    return [_problem(row, f"{path}, row {number}") for number, row in enumerate(read_user_jsonl(whole, str(path)), 1)]


def _problem(row: dict[str, str], where: str) -> HumanEvalProblem:
    missing = [name for name in FIELDS if name not in row]
    if missing:
        raise UserError(f"{where} has no '{missing[0]}'; a HumanEval row has {', '.join(FIELDS)}")
    tests = split_check(row["test"], row["entry_point"])
    return HumanEvalProblem(row["task_id"], row["prompt"], row["canonical_solution"], row["entry_point"], tests)


def split_check(test: str, entry_point: str) -> tuple[str, ...]:
    """The asserts of `check(candidate)` one by one; if it contains anything else, the whole of it as one test."""
    whole = (f"{test}\ncheck({entry_point})",)
    tree = ast.parse(test)
    rest = [node for node in tree.body if not isinstance(node, ast.Assign)]
    if len(rest) != 1 or not isinstance(rest[0], ast.FunctionDef) or len(rest[0].args.args) != 1:
        return whole
    body = [node for node in rest[0].body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    if not all(isinstance(node, ast.Assert) for node in body):
        return whole
    asserts = [node for node in body if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant)]
    rename = _Rename(rest[0].args.args[0].arg, entry_point)
    return tuple(ast.unparse(ast.Assert(test=rename.visit(node.test))) for node in asserts) or whole


class _Rename(ast.NodeTransformer):
    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Rename a use of the parameter."""
        return ast.copy_location(ast.Name(self.new, node.ctx), node) if node.id == self.old else node
