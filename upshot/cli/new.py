"""Start a task, recipe, metric, verifier, user, estimator or loss of your own.

Write a complete, commented file that runs as it is, and a test for it. Nothing is overwritten.
"""

from __future__ import annotations

import argparse
import shlex
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

PYTHON_KINDS = ("estimator", "loss", "metric", "user", "verifier")
FILES = {
    **{kind: {f"{kind}.py": "{name}.py", f"{kind}_test.py": "test_{name}.py"} for kind in PYTHON_KINDS},
    "task": {"task.py": "{name}.py", "task.yaml": "{name}.yaml", "task_test.py": "test_{name}.py"},
    "recipe": {"recipe.yaml": "{name}.yaml", "recipe_test.py": "test_{name}.py"},
}
"""Template → file, by what is made."""
NEXT = {
    "task": "upshot train {name}.yaml",
    "estimator": "upshot train quickstart train.advantage={name}:{name}",
    "loss": "upshot train quickstart train.loss={name}:{name}",
    "verifier": "upshot verify ANSWERS.jsonl --task {name}:{class_name}",
    "metric": "upshot score TALKS.jsonl --metric {name}:{name}",
    "user": "name it in a recipe: futures: {{user: {name}:{class_name}}}",
    "recipe": "upshot train {name}.yaml --dry-run",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("kind", choices=sorted(FILES), help="what to start")
    parser.add_argument("name", help="its name, such as my_task; the file is NAME.py or NAME.yaml")
    parser.add_argument("--dir", default=".", help="folder to write into (default: the current one)")


def run(args: argparse.Namespace) -> int:
    """Write the files and say what to do next."""
    from upshot.core.files import check_writable, write_atomic

    contents = render(args.kind, args.name)
    folder = Path(args.dir)
    _refuse_taken(folder, contents)
    for file, text in contents.items():
        check_writable(folder / file, "--dir")
        write_atomic(folder / file, text.encode())
        print(f"written  {folder / file}")
    names = {"name": args.name, "class_name": class_name(args.name)}
    there = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(args.dir)} && "
    install = "" if find_spec("pytest") else "pip install pytest && "
    tell = NEXT[args.kind].format(**names)
    print(f"try      {there if tell.startswith('upshot') else ''}{tell}")
    print(f"test     {there}{install}python -m pytest test_{args.name}.py")
    return 0


def render(kind: str, name: str) -> dict[str, str]:
    """The contents of the new files, by file name."""
    from importlib.resources import files

    from upshot.core.errors import UserError

    if not name.isidentifier() or iskeyword(name) or name != name.lower():
        raise UserError(f"'{name}' is not a valid module name; use lower-case letters, digits and _, as in my_{kind}")
    folder = files("upshot.cli") / "templates"
    texts = {file: (folder / f"{template}.txt").read_text("utf-8") for template, file in FILES[kind].items()}
    named = {file: text.replace("my_name", name) for file, text in texts.items()}
    return {file.format(name=name): text.replace("MyName", class_name(name)) for file, text in named.items()}


def class_name(name: str) -> str:
    """The class name for a module name: my_task → MyTask."""
    return "".join(part.capitalize() for part in name.split("_"))


def _refuse_taken(folder: Path, contents: dict[str, str]) -> None:
    import sys
    from importlib.util import find_spec

    from upshot.core.errors import UserError

    for file in contents:
        if (folder / file).exists():
            raise UserError(f"'{folder / file}' already exists; choose another name, or --dir")
    module = next((file.removesuffix(".py") for file in contents if file.endswith(".py")), "")
    if module and (module in sys.stdlib_module_names or find_spec(module) is not None):
        raise UserError(f"Python would import an installed module called '{module}' instead; choose another name")
