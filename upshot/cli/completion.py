"""Print a completion script for your shell: Tab completes verbs, recipes, keys and their values.

bash: put `eval "$(upshot completion bash)"` into ~/.bashrc. zsh: the same with zsh in ~/.zshrc. fish: `upshot
completion fish > ~/.config/fish/completions/upshot.fish`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.resources import files

from upshot.cli.options import subparsers

SHELLS = ("bash", "zsh", "fish")
"""Their scripts are in `templates/`."""
WITH_RECIPE = ("train", "rollout", "eval", "sweep", "show", "diff")
"""Words after which a recipe is named, and then its keys."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("shell", choices=[*SHELLS, "words"], help="your shell; words: for the scripts themselves")
    parser.add_argument("line", nargs="*", default=[], help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Print the script, or what may replace the last word of a line."""
    if args.shell == "words":
        print("\n".join(complete(args.line or [""])))
    else:
        print(script_of(args.shell), end="")
    return 0


def script_of(shell: str) -> str:
    """The script for a shell."""
    return (files("upshot.cli") / "templates" / f"completion.{shell}.txt").read_text("utf-8")


def complete(line: Sequence[str]) -> list[str]:
    """What the last word of a command line may become."""
    *before, word = line
    return sorted({candidate for candidate in _candidates(before, word) if candidate.startswith(word)})


def _candidates(before: Sequence[str], word: str) -> list[str]:
    from upshot.cli import VERBS, make_parser

    if not before:
        return list(VERBS)
    if before[-1] == "=" and len(before) > 1:  # bash takes `key=value` for three words
        return _values(before[-2])
    if word == "=":
        return []
    parser = make_parser(before[:1])
    for name in before:
        parser = subparsers(parser).get(name, parser)
    if word.startswith("-"):
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        return [flag for action in shown for flag in action.option_strings]
    if inner := list(subparsers(parser)):
        return inner
    named = next((place for place, part in enumerate(before) if part in WITH_RECIPE), None)
    if named is None:
        return []
    if "=" in word:
        key = word.partition("=")[0]
        return [f"{key}={value}" for value in _values(key)]
    if len(before) == named + 1:
        from upshot.config.load import list_recipes

        return list_recipes()
    from upshot.config.recipe import Recipe
    from upshot.config.validation import keys_of

    return [f"{key}=" for key in keys_of(Recipe)]


def _values(key: str) -> list[str]:
    """The texts that a key may have, where the recipe lists them."""
    import typing

    from upshot.config.recipe import Recipe
    from upshot.config.validation import field_at

    info = field_at(Recipe, key.split("."))
    if info is None:
        return []
    if info.annotation is bool:
        return ["true", "false"]
    if key == "train.method":
        from upshot.config.method import methods

        return methods.names()
    return [str(value) for value in typing.get_args(info.annotation) if isinstance(value, str)]
