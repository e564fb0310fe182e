"""What someone who reads one training step passes: files, functions and depth of a step of the quickstart.

A profile hook counts from the end of the first step to the end of the second. Comprehensions and lambdas count as
functions, as the interpreter sees them. The second line shows what is left without list, set and dict comprehensions,
which Python 3.12 and later run inline, and without anything that has no name. Then: where the files are, where the
deepest stacks end, and the files that contribute least, which a reader opens for a line or two. status.json is left
out, because it is written once per second, not once per step. With --list also every function, file by file.

    python benchmarks/step_trace.py [--list]
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import upshot
from upshot.cli import main
from upshot.rollout.reply import Rollout
from upshot.run import writer
from upshot.run.run import TrainingRun

ROOT = str(Path(upshot.__file__).parent) + "/"
SMALL = (
    "task.rows_per_split=16", "train.steps=2", "train.prompts_per_step=2", "train.group_size=2", "warm_start.steps=1",
    "warm_start.batch=4", "model.tiny={hidden: 16, layers: 1, heads: 2, mlp: 32}", "--quiet",
)  # fmt: skip
INLINE = ("<listcomp>", "<setcomp>", "<dictcomp>")
"""Functions of their own until Python 3.11."""
FEW = 2
"""Named functions of a file that contributes little."""
functions: set[tuple[str, str]] = set()
deepest: list[str] = []
depths: dict[str, int] = {}
"""The deepest stack that ends in each file."""


def look(frame: FrameType, event: str, _: object) -> None:
    """Take note of a call of ours, and of how deep it is among ours."""
    global deepest
    if event != "call" or not frame.f_code.co_filename.startswith(ROOT):
        return
    functions.add((frame.f_code.co_filename.removeprefix(ROOT), frame.f_code.co_qualname))
    stack, above = [], frame
    while above is not None:
        if above.f_code.co_filename.startswith(ROOT):
            stack.append(above.f_code.co_qualname)
        above = above.f_back  # type: ignore[assignment]
    deepest = max(deepest, stack[::-1], key=len)
    file = frame.f_code.co_filename.removeprefix(ROOT)
    depths[file] = max(depths.get(file, 0), len(stack))


def step_done(self: TrainingRun, step: int, logs: Any, groups: Sequence[Sequence[Rollout]] = ()) -> None:
    """A step is written down; between the first and the second one everything is seen."""
    written(self, step, logs, groups)
    if self.phase == "rl":
        sys.setprofile(look if step == 1 else None)


written, TrainingRun.step_done = TrainingRun.step_done, step_done  # type: ignore[method-assign]

writer.STATUS_SECONDS = float("inf")

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(["train", "quickstart", *SMALL, f"run_dir={folder}/run"])
    files = {file for file, _ in functions}
    named = [name for _, name in functions if "<" not in name.replace("<locals>", "")]
    print(f"{len(files)} files, {len(functions)} functions, {len(deepest)} deep")
    inline = sum(name.endswith(INLINE) for _, name in functions)
    print(f"{len(functions) - inline} functions without inlined comprehensions, {len(named)} with a name")
    print("files by room: " + ", ".join(f"{r} {n}" for r, n in Counter(f.split("/")[0] for f in files).most_common()))
    print(" > ".join(deepest))
    deep = Counter({file: depth for file, depth in depths.items() if depth > len(deepest) - 5})
    print("deepest files: " + ", ".join(f"{file} {depth}" for file, depth in deep.most_common()))
    by_file = Counter(file for file, name in functions if name in named)
    least = sorted(file for file in files if by_file[file] <= FEW)
    print(f"{len(least)} files contribute {FEW} functions with a name or fewer: " + ", ".join(least))
    if "--list" in sys.argv:
        for file in sorted(files):
            print(f"{file}: " + ", ".join(sorted(name for path, name in functions if path == file)))
