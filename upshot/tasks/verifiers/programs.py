"""The program of a response: which of its fenced blocks it is, and which others that one cannot do without.

A block is known by what it defines, never by what it talks about: behind a solution stand examples of its use, its
tests once more, sample inputs. Nothing is run here.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from upshot.sandbox.inside.cases import is_case, is_test, last_name
from upshot.sandbox.inside.cases import parse as parse_test  # it knows which imports are the program's
from upshot.sandbox.local.languages import canonical

READS, WRITES = "input", "print"
"""Names by which a program for stdin and stdout is known; whatever reads or writes there counts as one."""
_ITEM = r"[ \t]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)?+"
"""What stands before a fence that is indented or begins an item of a list."""
_OPENS = re.compile(
    rf"^(?:({_ITEM})(`{{3,}}+|~{{3,}}+)|(?:[^`\n]|`{{1,2}}+(?!`))*+`{{3,}}+)[ \t]*+([\w+#.-]*+)[^`\n]*+$", re.MULTILINE
)
"""A fence, which may be of backticks behind a sentence."""
_MOST_FENCES = 16
"""Fences inside of a program's strings that are looked past."""
_MAIN = re.compile(r"\bmain\b")
_CODE = re.compile(r"^(?:def |class |import |from \w+ import |print\(|for .*:|while .*:|\w+ ?= ?)", re.MULTILINE)
_DEFINES = re.compile(
    r"^[ \t]*(?:async[ \t]+def|def|class)[ \t]+(\w+)|^(\w+)[ \t]*=|\b(input|print)[ \t]*\(|\b(stdin)\b", re.MULTILINE
)
"""What a text that is not Python seems to define."""
_CALLED = re.compile(r"(\b(?:def|class)[ \t]+)?([A-Za-z_]\w*)[ \t]*\(")
_LONG_TEST = 20_000
_BUILTINS = frozenset(dir(builtins))
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_NAMED = _FUNCTION | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar


def program_in(text: str, names: Collection[str] = (), language: str = "python") -> str | None:
    """The program of a response: the last block in the language (or unnamed) that defines most of the names.

    What that block or the names need of other blocks goes with it, in their order. Of a program for stdin and stdout
    the names are `READS` and `WRITES`; one in another language than Python is the last block that has a `main`.
    Without a block the whole response is the program where it looks like one.
    """
    text, is_python = text[-200_000:], language == "python"
    blocks = [(canonical(word), body) for word, body in _blocks(text) if body.strip()]
    fitting = [(word, body) for word, body in blocks if word in (language, "")]
    if not is_python:
        if named := [body for word, body in fitting if word == language] or [body for _, body in fitting]:
            return next((body for body in reversed(named) if _MAIN.search(body)), named[-1])
    elif fitting:
        return fitting[0][1] if len(fitting) == 1 else _choose(fitting, set(names))
    looks = _CODE.search(text) if is_python else _MAIN.search(text)
    return text if not blocks and looks else None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, body) of every fenced block; the last one may be unclosed."""
    at = 0
    while opened := _OPENS.search(text, at):
        begin, fence = opened.end() + 1, opened[2] or "```"
        closed = _find_close(text, begin, fence)
        yield opened[3], _dedent(text[begin : closed.start() if closed else None], len(opened[1] or ""))
        if closed is None:
            return
        at = closed.end()


def _find_close(text: str, begin: int, fence: str) -> re.Match[str] | None:
    """The fence that ends a block: the first, or the first outside of triple quotes where that makes it Python."""
    run = f"{fence[0]}{{{len(fence)},}}+"
    closes = re.compile(rf"^[ \t]*+{run}|{run}(?=[ \t]*$)", re.MULTILINE)
    first = None
    for close in itertools.islice(closes.finditer(text, begin), _MOST_FENCES):
        first = first or close
        body = text[begin : close.start()]
        if body.count('"""') % 2 == body.count("'''") % 2 == 0:
            return close if close is first or parse(body) else first
    return first


def _dedent(body: str, most: int) -> str:
    """The lines without the indentation that they share, up to that of their fence."""
    lines = body.split("\n")
    shared = min((len(line) - len(line.lstrip(" \t")) for line in lines if line.strip()), default=0)
    return "\n".join(line[min(shared, most) :] for line in lines) if min(shared, most) else body


@dataclass(frozen=True)
class _Block:
    """A block of Python, or of what is not quite."""

    text: str
    is_named: bool
    """Whether its fence says that it is Python."""
    is_code: bool
    """Whether it is Python that does something; a sample input can be a number, which is Python, too."""
    defined: set[str]
    provided: set[str]
    """What others can have of it: what it defines and imports."""
    needed: set[str]


def _read_block(text: str, is_named: bool) -> _Block:
    tree = parse(text)
    if tree is None:
        words = {word for groups in _DEFINES.findall(re.sub("#.*", "", text)) for word in groups if word}
        return _Block(text, is_named, False, words | ({READS} if "stdin" in words else set()), set(), set())
    acts = any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in tree.body)
    nodes, defined = list(ast.walk(tree)), list_defined(tree)
    imported = {name for node in nodes for name in _list_imported(node)}
    return _Block(text, is_named, acts, defined | _find_streams(nodes), defined | imported, free_names(tree))


def _choose(fitting: Sequence[tuple[str, str]], names: set[str]) -> str:
    """The block that defines most of the names, with those that it and the names need."""
    blocks = [_read_block(body, bool(word)) for word, body in fitting]
    counts = [len(block.defined & names) for block in blocks]
    scores = [(known, block.is_named, known > 0 or block.is_code) for known, block in zip(counts, blocks, strict=True)]
    best = max(range(len(blocks)), key=lambda index: (scores[index], index))
    nearest = [*range(len(blocks) - 1, best, -1), *range(best), best]  # the one before the best counts more than later
    home = {name: index for index in nearest for name in blocks[index].provided}
    joined, waiting = set[int](), {best}
    while waiting:
        joined.add(index := waiting.pop())
        lacking = blocks[index].needed | (names - _BUILTINS if index == best else set())
        lacking -= blocks[index].defined | blocks[index].provided
        waiting |= {home[name] for name in lacking & home.keys()} - joined
    return "\n".join(blocks[index].text for index in sorted(joined))


def parse(text: str) -> ast.Module | None:
    """The tree of a text that is Python; None for any other."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes
        return ast.parse(text)
    return None


def list_defined(tree: ast.Module) -> set[str]:
    """What a text defines at its top level, but for imports, and the methods of its classes."""
    defined, waiting = set[str](), [*ast.iter_child_nodes(tree)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _FUNCTION | ast.ClassDef):
            defined.add(node.name)
            waiting += [part for part in node.body if isinstance(node, ast.ClassDef) and isinstance(part, _FUNCTION)]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif not isinstance(node, ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return defined


def free_names(tree: ast.Module) -> set[str]:
    """The names that a text uses and neither binds anywhere itself nor finds among the builtins."""
    used, bound = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, _NAMED):
            bound.add(str(node.name))
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        else:
            bound.update(_list_imported(node))
    return used - bound - _BUILTINS


def _list_imported(node: ast.AST) -> Iterator[str]:
    for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
        yield alias.asname or alias.name.partition(".")[0]


def _find_streams(nodes: Iterable[ast.AST]) -> set[str]:
    """`READS` and `WRITES`, as far as a text does so: by a builtin, a stream, its path or its number."""
    words = set()
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            words.add(last_name(node))
        elif isinstance(node, ast.alias):
            words.add(node.name)
        elif isinstance(node, ast.Constant) and node.value == "/dev/stdin":
            words.add("stdin")
        elif isinstance(node, ast.Call) and last_name(node.func) in ("open", "fdopen", "read"):
            words |= {"stdin"} if [*map(ast.unparse, node.args[:1])] == ["0"] else set()  # the number of a stream
    reads, writes = words & {"input", "raw_input", "stdin", "fileinput"}, words & {"print", "stdout", "write"}
    return ({READS} if reads else set()) | ({WRITES} if writes else set())


@functools.lru_cache(maxsize=1024)  # all samples of a prompt come with the same tests
def names_needed(test: str) -> frozenset[str]:
    """The names that a test needs of the program: those that it uses and does not define itself."""
    tree = parse_test(test) if len(test) <= _LONG_TEST else ""
    if isinstance(tree, ast.Module):
        return frozenset(free_names(tree))
    called = _CALLED.findall(test[:_LONG_TEST])
    return frozenset({name for _, name in called} - {name for defines, name in called if defines})


def each_method(source: str) -> list[str]:
    """The source of unittest classes, once for every test method, without the others; itself if it has none."""
    tree = parse_test(source)
    if isinstance(tree, str):
        return [source]
    methods = [(node.name, item.name) for node in tree.body if is_case(node) for item in node.body if is_test(item)]
    return [_keep_method(source, *names) for names in methods] or [source]


def _keep_method(source: str, case: str, method: str) -> str:
    """A source without the test methods of its classes, but for one."""
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            kept = [item for item in node.body if not is_test(item) or (node.name, item.name) == (case, method)]
            node.body = kept or [ast.Pass()]
    return ast.unparse(tree)
