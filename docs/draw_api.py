"""Writes docs/api.md, the page of the Python API, from signatures, docstrings and the examples of docs/api_examples.py.

python docs/draw_api.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import upshot
from upshot.api.settings import RewardOptions
from upshot.rewards.advantages.grouped import estimators
from upshot.rewards.metric import metrics
from upshot.rollout.credit.rules import rules
from upshot.tasks.base import tasks
from upshot.tasks.participants.base import users
from upshot.tasks.verifiers.base import verifiers
from upshot.training.objectives.objectives import surrogates

DOCS = Path(__file__).resolve().parent
HEAD = """\
# The Python API

*Written by `python docs/draw_api.py` from signatures and docstrings. The examples run in the tests, in this order.*

`import upshot` is instant: each name is imported at its first use. Everything here works in a script and in a notebook.
If the fix is on your side, a call raises `upshot.UserError` with one line that says what to change. To begin a file of
your own, run `upshot new task` (or `recipe`, `metric`, `verifier`, `user`, `estimator`, `loss`). It writes a complete
file and its test (run it with `python -m pytest`, after `pip install pytest`).
"""
ESTIMATORS = """\
An estimator is a function of a step's credits: `(step, **options) → advantages`. A step is a list of groups, a group a
list of replies, a reply its `Credit` (None: nothing was sampled). It returns the same shape with one number for every
span, or None if a span must not be trained.
"""
LOSSES = """\
A loss is a function of a batch: `(batch, logprobs_M, config, **options) → PolicyLoss`, with one number for each of the
M trained tokens. The three arguments are passed by position.
"""
CREDIT_RULES = """\
A credit rule says which tokens earn the main reward: `credit(reply, total) → Credit`. A recipe names it by its path
(`credit.by: my_package.module:LastTurn`). A constructor may take `tokens`, `gamma`, `split` and `forks` of the recipe's
section `credit`, by these names; its other arguments are options of its own.
"""
NAMED = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): (.*)$")
OBJECT = set(dir(object))


def examples() -> dict[str, str]:
    """The example of each section: what follows a line `# %% title` of api_examples.py."""
    parts = re.split(r"^# %% (.+)\n", (DOCS / "api_examples.py").read_text(), flags=re.MULTILINE)[1:]
    return {title: code.strip() for title, code in zip(parts[::2], parts[1::2], strict=True)}


def call(name: str, thing: Any) -> str:
    """How something is called, without types; `**overrides` stands for the sections that a signature lists."""
    parameters = [p for p in inspect.signature(thing).parameters.values() if p.name != "self"]
    shown = [p.replace(annotation=p.empty) for p in parameters if repr(p.default) != "…"]
    lines = str(inspect.Signature(shown))
    if len(shown) < len(parameters):
        lines = lines[:-1] + ", **overrides)"
    return textwrap.fill(f"{name}{lines}", 110, subsequent_indent="    ", break_long_words=False)


def described(doc: str) -> str:
    """A docstring as Markdown: lines `name: what` become a list, indented code stays."""
    out: list[str] = []
    for line in inspect.cleandoc(doc).splitlines():
        if match := NAMED.match(line):
            out += [""] if out and out[-1] and not out[-1].startswith(("- ", "  ")) else []
            out.append(f"- `{match[1].replace(', ', '`, `')}`: {match[2]}")
        elif line and not line.startswith(" ") and out and out[-1].startswith(("- `", "  ")):
            out.append(f"  {line}")
        else:
            out.append(line)
    return "\n".join(out).strip()


def first_line(doc: str | None) -> str:
    """What something is, in its docstring's first sentence, for a cell of a table."""
    return " ".join((inspect.cleandoc(doc or "").split("\n\n")[0]).split()).replace("|", "\\|")


def field_docs(kind: type) -> Iterator[tuple[str, str]]:
    """Annotated attributes of a class and the docstrings under them."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            yield node.target.id, first_line(said)


def members(kind: type) -> str:
    """Fields, properties and methods that a class declares itself, as a table."""
    rows = [(f"`{name}`", text) for name, text in field_docs(kind)]
    for name, member in vars(kind).items():
        if name.startswith("_") or name in OBJECT:
            continue
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if isinstance(plain, property):
            rows.append((f"`{name}`", first_line(plain.__doc__)))
        elif inspect.isfunction(plain):
            waits = "await " if inspect.iscoroutinefunction(plain) else ""
            names = [p.name for p in inspect.signature(plain).parameters.values() if p.name not in ("self", "cls")]
            rows.append((f"`{waits}{name}({', '.join(names)})`", first_line(plain.__doc__)))
    lines = [f"| {name} | {text} |" for name, text in rows]
    return "\n".join(["| member | what it is |", "|---|---|", *lines]) if lines else ""


def of_function(name: str, function: Callable[..., Any]) -> str:
    """A function: signature and docstring."""
    return f"### `{name}`\n\n```text\n{call(name, function)}\n```\n\n{described(function.__doc__ or '')}"


def of_class(name: str, kind: type) -> str:
    """A class: what it is, how it is made, what it has."""
    bare = inspect.isabstract(kind) or issubclass(kind, Enum) or kind.__init__ is object.__init__  # type: ignore[misc]
    made = "" if bare else call(name, kind.__init__)  # type: ignore[misc]
    own = "" if dataclasses.is_dataclass(kind) else (kind.__init__.__doc__ or "")  # type: ignore[misc]
    text = described(kind.__doc__ or "")
    parts = [f"### `{name}`", f"```text\n{made}\n```" if made else "", text]
    parts += [described(own) if own != object.__init__.__doc__ and "__init__" in vars(kind) else "", members(kind)]
    return "\n\n".join(part for part in parts if part)


def registered(registry: Any, key: str) -> str:
    """Everything that a recipe can name in a key, each with its docstring's first line."""
    things: dict[Any, list[str]] = {}
    for name in registry.names():
        thing = registry.get(name)
        things.setdefault(getattr(thing, "__wrapped__", thing), []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {first_line(thing.__doc__)} |" for thing, names in things.items()]
    return "\n".join([f"| `{key}` | what it is |", "|---|---|", *lines])


def reward_settings() -> str:
    """What `upshot.reward` takes by name."""
    rows = []
    for name, hint in get_type_hints(RewardOptions, include_extras=True).items():
        setting = get_args(hint)[1]
        rows.append(f"| `{name}` | `{setting.default!r}` | {setting.help} |".replace("| `None` |", "| – |"))
    return "\n".join(["| argument | default | what it is |", "|---|---|---|", *rows])


def page() -> str:
    """docs/api.md."""
    public = upshot
    sections = {
        "Run a recipe": [of_function("upshot.load", public.load), of_function("upshot.train", public.train)],
        "Read runs": [
            of_function("upshot.runs.read", public.runs.read),
            of_function("upshot.runs.find", public.runs.find),
            of_class("RunFolder", public.runs.RunFolder),
        ],
        "Score replies": [
            of_function("upshot.reward", public.reward),
            reward_settings(),
            "`await upshot.reward_async(…)` is the same for async code.",
        ],
        "The loop in pieces": [of_class("upshot.Trainer", public.Trainer), of_function("upshot.talk", public.talk)],
        "What was said, and what it is worth": [
            of_class(f"upshot.{name}", getattr(public, name))
            for name in ("Conversation", "Message", "Row", "Score", "Reason", "Rollout", "Credit", "Span", "Model")
        ]
        + ["`upshot.Recipe` is a resolved recipe, with every default filled in: [its keys](reference.md)."],
        "Metrics": [of_class("upshot.Metric", public.Metric), registered(metrics, "reward.metrics")],
        "Tasks": [of_class("upshot.Task", public.Task), registered(tasks, "task.name")],
        "Verifiers": [of_class("upshot.Verifier", public.Verifier), registered(verifiers, "verifier")],
        "Participants and users": [
            of_class("upshot.Participant", public.Participant),
            of_class("upshot.User", public.User),
            of_class("upshot.Observation", public.Observation),
            registered(users, "futures.user"),
        ],
        "Estimators": [
            ESTIMATORS,
            registered(estimators, "train.advantage"),
        ],
        "Losses": [
            LOSSES,
            registered(surrogates, "train.loss"),
        ],
        "Credit rules": [
            CREDIT_RULES,
            registered(rules, "credit.by"),
        ],
    }
    code = examples()
    parts = [HEAD]
    for title, entries in sections.items():
        example = [f"```python\n{code.pop(title)}\n```"] if title in code else []
        parts += [f"## {title}", *example, *entries]
    assert not code, f"examples of no section: {list(code)}"
    whole = "\n\n".join(part.strip() for part in parts) + "\n"
    return whole


if __name__ == "__main__":
    (DOCS / "api.md").write_text(page())
    print(DOCS / "api.md")
