"""List and show recipes, compare two, or import one from another project.

List recipes, show what one resolves to or how two differ, or turn another project's config into one.
"""

from __future__ import annotations

import argparse
import sys

from upshot.cli.options import add_options, add_parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verbs below it."""
    add_parts(parser, **{"list": _list, "show": _show, "diff": _diff, "import": _import})


def _list(parser: argparse.ArgumentParser) -> None:
    """List the recipes that ship with the project."""
    parser.set_defaults(run=run_list)


def _show(parser: argparse.ArgumentParser) -> None:
    """Show a recipe resolved, with the origin of each value."""
    add_options(parser, "recipe", "overrides")
    parser.add_argument("--yaml", action="store_true", help="print a YAML file that `upshot train` accepts")
    parser.add_argument("--changed", action="store_true", help="show only keys that are not at their default")
    parser.set_defaults(run=run_show)


def _diff(parser: argparse.ArgumentParser) -> None:
    """Show the keys in which two recipes or run folders differ."""
    parser.add_argument("one", help="recipe name, file or run folder")
    parser.add_argument("two", help="recipe name, file or run folder")
    parser.set_defaults(run=run_diff)


def _import(parser: argparse.ArgumentParser) -> None:
    """Turn a config or launch script of CollabLLM, its verl recipe or the classmate fork into a recipe.

    Turn a config (.yaml, .json) or a launch script (.sh) of CollabLLM, of its verl recipe or of the classmate fork into
    a recipe. A script that does not train becomes the command that does the same. Settings that could not be carried
    over are listed with the reason. None of the original code is run.
    """
    files = "a .sh, .yaml or .json file, the files it names, and key=value (their keys or ours), which override them"
    parser.add_argument("theirs", nargs="+", metavar="THEIRS", help=files)
    parser.add_argument("--out", metavar="FILE", help="write the recipe to this file (default: print it)")
    dropped = "continue without this setting, which changes what is learned (repeatable; --drop=--flag)"
    parser.add_argument("--drop", action="append", default=[], metavar="KEY", help=dropped)
    parser.set_defaults(run=run_import)


def run_list(args: argparse.Namespace) -> int:
    """Names and first lines."""
    from rich.table import Table

    from upshot.config.load import describe_recipe, find_recipe, list_recipes
    from upshot.run.console import whole_console

    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name in list_recipes():
        table.add_row(name, describe_recipe(find_recipe(name)))
    whole_console().print(table)
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Every value and where it came from."""
    from rich.table import Table

    from upshot.config.layers import DEFAULT, flatten
    from upshot.config.load import dump_recipe, load_recipe
    from upshot.config.trust import CodeNotTrusted
    from upshot.rollout.check_names import check_names
    from upshot.run.console import whole_console

    loaded = load_recipe(args.recipe, args.overrides)
    try:
        check_names(loaded.recipe)
    except CodeNotTrusted as error:
        print(f"upshot: names are not checked: {error}", file=sys.stderr)
    if args.yaml:
        print(dump_recipe(loaded.recipe), end="")
        return 0
    table = Table("key", "value", "origin", box=None)
    for key, value in flatten(loaded.recipe.model_dump(mode="json")):
        origin = loaded.origin(key)
        if args.changed and origin == DEFAULT:
            continue
        style = "dim" if origin == DEFAULT else ""
        table.add_row(key, repr(value) if isinstance(value, str) else str(value), origin, style=style)
    whole_console().print(table)
    return 0


def run_diff(args: argparse.Namespace) -> int:
    """The keys that differ, side by side; 1 if there are any, as for `diff`."""
    from rich.table import Table

    from upshot.config.layers import differences
    from upshot.config.load import load_recipe
    from upshot.run.console import whole_console

    changed = differences(load_recipe(args.one).recipe, load_recipe(args.two).recipe, "–")
    table = Table("key", args.one, args.two, box=None)
    for key, values in changed.items():
        table.add_row(key, *map(str, values))
    whole_console().print(table if changed else "no differences")
    return 1 if changed else 0


def run_import(args: argparse.Namespace) -> int:
    """Print or write the recipe; list on stderr what was not imported."""
    import sys
    from pathlib import Path

    import yaml

    from upshot.config.load import validate_recipe
    from upshot.offline.migrate.recipe import ask, carry, command_line, find_script, refuse_losses
    from upshot.offline.migrate.theirs import read_all
    from upshot.rollout.check_names import check_names

    theirs = read_all(args.theirs, find_script)
    names = ", ".join(Path(path).name for path in args.theirs if "=" not in path)
    script = find_script(theirs.program)
    if script and not script["command"].startswith("upshot train"):
        text, carried = command_line(theirs, script)
        look, about = "run it with  sh", ""
    else:
        carried = carry(theirs)
        ask(theirs, carried)
        refuse_losses(carried, args.drop)
        check_names(validate_recipe(carried.recipe, names))
        text = yaml.safe_dump(carried.recipe, sort_keys=False, allow_unicode=True)
        look, about = "look at it with  upshot recipe show", f" Its rows are of the task '{carried.keys['task.name']}'."
    text = f"# Made from {names} by `upshot recipe import`.{about}\n{text.rstrip()}\n"
    if args.out:
        Path(args.out).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    for key, value, why in carried.left:
        print(f"not imported: {key}={value}: {why}", file=sys.stderr)
    if args.out:
        print(f"{args.out}: {len(carried.left)} settings not imported; {look} {args.out}")
    return 0
