"""Runs the notebooks in docs/notebooks/ and writes docs/tutorials/NAME.md of each: words, code, what was printed.

    python docs/draw_notebooks.py [NAME …]        # minutes; in a folder of its own, which is taken away again

Notebooks are plain Python in jupytext's percent format: `jupytext --to ipynb docs/notebooks/task.py` makes an .ipynb of
one, editors and Jupyter's extension open them as they are, and `python docs/notebooks/task.py` runs one.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
NOTEBOOKS = DOCS / "notebooks"
TUTORIALS = DOCS / "tutorials"
HEAD = "<!-- Made from docs/notebooks/{name}.py by: python docs/draw_notebooks.py {name} -->\n"


def cells(text: str) -> list[tuple[bool, str]]:
    """The cells of a notebook: whether one is code, and its text."""
    found = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)[1:]
    pairs = zip(found[::2], found[1::2], strict=True)
    return [("[markdown]" not in kind, body.strip("\n")) for kind, body in pairs]


def run(name: str, parts: Iterable[tuple[bool, str]]) -> Iterator[str]:
    """What every cell printed, one after the other, in the folder where we are."""
    space: dict[str, object] = {"__name__": "__main__"}
    for is_code, body in parts:
        said = io.StringIO()
        if is_code:
            with contextlib.redirect_stdout(said):
                exec(compile(body, f"{name}.py", "exec"), space)
        yield said.getvalue()


def render(name: str, parts: Iterable[tuple[bool, str]], outputs: Iterable[str]) -> str:
    """The page of a notebook."""
    out = [HEAD.format(name=name)]
    for (is_code, body), said in zip(parts, outputs, strict=True):
        if not is_code:
            words = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
            out.append(f"{words}\n")
            continue
        out.append(f"```python\n{body}\n```\n")
        if said.strip():
            out.append(f"```text\n{said.rstrip()}\n```\n")
    return "\n".join(out)


def without_output(page: str) -> str:
    """A page without what was printed: that much depends on the source alone."""
    return re.sub(r"```text\n.*?\n```\n\n?", "", page, flags=re.DOTALL).rstrip("\n")


def main(names: list[str]) -> int:
    """Run the named notebooks, or all, and write their pages."""
    for name in names or sorted(path.stem for path in NOTEBOOKS.glob("*.py")):
        parts = cells((NOTEBOOKS / f"{name}.py").read_text())
        before = Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                outputs = list(run(name, parts))
            finally:
                os.chdir(before)
        (TUTORIALS / f"{name}.md").write_text(render(name, parts, outputs))
        print(TUTORIALS / f"{name}.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
