"""Train a model with a recipe, or resume a run.

Train with a recipe (a name from `upshot recipe list`, or a YAML file) with key=value overrides. With --resume, continue
a run; steps, epochs, budget, eval, models, trackers and a few more keys may change.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from upshot.cli.options import INTERRUPTED, add_options
from upshot.core.errors import UserError, reason_of, user_error_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from upshot.config.recipe import Recipe
    from upshot.run.checks.context import Finding
    from upshot.run.folder import RunFolder
    from upshot.training.learner.distributed.ranks import Ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    named = {"nargs": "?", "help": "recipe name or file; leave it out with --resume"}
    example = {"help": "recipe keys, such as train.lr=1e-5 futures.samples=3"}
    add_options(parser, "recipe", "overrides", recipe=named, overrides=example)
    add = parser.add_argument
    where = "train in this process, or with verl on a cluster (docs/cluster.md), whose own keys may then be set, too"
    add("--engine", choices=("local", "verl"), default="local", help=where)
    checks = "check everything (keys, endpoints, files, model, prompts …) and print the plan; train nothing"
    add("--dry-run", action="store_true", help=checks)
    rate = "with --dry-run: estimate the time at this rate of sampled tokens"
    add("--tokens-per-second", type=float, metavar="N", help=rate)
    add("--offline", action="store_true", help="check without calling an endpoint or the Hub")
    add("--resume", metavar="DIR", help="continue the run in this folder")
    quiet, json = {"help": "print only the run folder"}, {"help": "print one line of JSON per step"}
    add_options(parser, "quiet", "json", quiet=quiet, json=json)


def run(args: argparse.Namespace) -> int:
    """Check, train, report; a stopped run says how to resume it."""
    if args.engine == "verl":
        return _on_verl(args)
    recipe, _, folder = _load_recipe(args)
    if args.tokens_per_second is not None and not args.tokens_per_second > 0:
        raise UserError(f"--tokens-per-second is {args.tokens_per_second:g}; it must be more than 0")
    if args.offline and args.dry_run:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's package is imported
    if args.dry_run:
        size, first = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
        return 0 if not first or _check(recipe, args, folder is not None, size) else 2
    from upshot.training.learner.distributed.process_group import open_ranks

    ranks = open_ranks(recipe.model.device)
    try:
        return _train(args, recipe, folder, ranks)
    except BaseException as error:
        ranks.stop(reason_of(error), whole=False)
        if ranks.agreed and not ranks.first:  # the first rank says why all stopped
            if isinstance(error, KeyboardInterrupt):
                return INTERRUPTED
            if user_error_in(error) is not None:
                return 2
        raise
    finally:
        ranks.leave()


def _train(args: argparse.Namespace, recipe: Recipe, folder: RunFolder | None, ranks: Ranks) -> int:
    new = folder is None
    if not ranks.broadcast_object("checked", ranks.first and _check(recipe, args, resumed=not new, ranks=ranks.size)):
        return 2
    from upshot.run.console import (
        Reporter,
        make_reporter,  # after the checks: PyTorch takes seconds to import
    )
    from upshot.run.folder import RunFolder
    from upshot.run.report.report import write_report
    from upshot.run.run import train

    if not ranks.first:
        there = RunFolder(ranks.broadcast_object("run folder", Path()), read_only=True)
        train(recipe, there, Reporter(), ranks, checked=True)
        return 0
    folder = folder or RunFolder.create(recipe)
    ranks.broadcast_object("run folder", folder.path)
    try:
        train(recipe, folder, make_reporter(args.quiet, args.json), ranks, checked=True)
    except BaseException:
        if new:
            folder.drop_failed_start()
        if folder.begun:
            with contextlib.suppress(Exception):  # a stopped run gets its page, too
                write_report(folder.path)
        if folder.latest() is not None:
            print(f"resume with  upshot train --resume {folder.path}", file=sys.stderr)
        raise
    page = write_report(folder.path)
    if not args.json:
        print(folder.path if args.quiet else f"run folder  {folder.path}\nreport      {page}")
    return 0


def _check(recipe: Recipe, args: argparse.Namespace, resumed: bool, ranks: int) -> bool:
    """Whether the recipe passes all checks; prints one line per problem, and with --dry-run the plan."""
    from upshot.run.checks import find
    from upshot.run.forecast import plan

    findings = find(recipe, args.offline, resumed, ranks)
    if args.dry_run and not any(finding.fatal for finding in findings):
        from upshot.run.checks.trial import try_out

        findings = [*findings, *try_out(recipe, args.offline)]
    if args.dry_run and not any(finding.fatal for finding in findings):
        from upshot.run.checks.first_row import show_first_row
        from upshot.run.checks.profiles import profile_task

        lines, more = show_first_row(recipe, args.offline)
        findings = [*findings, *more]
        print("\n".join(filter(None, (plan(recipe, ranks, args.tokens_per_second), *lines, profile_task(recipe)))))
    return _print_findings(findings, args.quiet)


def _print_findings(findings: Sequence[Finding], quiet: bool) -> bool:
    """Print the findings of the checks, one line each; whether nothing needs to be fixed."""
    wrong = [finding.says for finding in findings if finding.fatal]
    notes = [finding.says for finding in findings if not finding.fatal]
    if not quiet:
        print("".join(f"note       {' '.join(says.split())}\n" for says in notes), end="", file=sys.stderr)
    print("".join(f"upshot: {' '.join(says.split())}\n" for says in wrong), end="", file=sys.stderr)
    return not wrong


def _on_verl(args: argparse.Namespace) -> int:
    """Start verl on a recipe or on a run to resume, or print both configs; refuse what verl cannot run."""
    from upshot.config.method import method_of
    from upshot.rollout.check_names import check_names
    from upshot.tasks.base import tasks
    from upshot.verl.config import compose
    from upshot.verl.paths import make_absolute
    from upshot.verl.plan import ClusterPlace

    recipe, theirs, folder = _load_recipe(args)
    check_names(recipe)
    recipe = make_absolute(recipe)
    if not method_of(recipe.train.method).on_ray:
        # A method that needs no Ray on several ranks; this process becomes torchrun.
        from upshot.verl.ranks import torchrun_command

        recipe_words = [word for word in args.overrides if word not in theirs]
        command = torchrun_command([args.recipe, *recipe_words, *(["--quiet"] if args.quiet else [])], theirs)
        if args.dry_run:
            print("trained without Ray, by:  " + " ".join(command))
            return 0 if _check(recipe, args, False, int(command[command.index("--nproc-per-node") + 1])) else 2
        sys.stdout.flush()
        return os.execv(command[0], command)
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    plan = compose(recipe, ClusterPlace(rows=len(task.rows("train"))), theirs)
    if args.dry_run:
        from upshot.verl.checks import find

        print(plan.page())
        plan.check()
        findings = find(recipe, plan, args.offline, folder is not None)
        return 0 if _print_findings(findings, args.quiet) else 2
    from upshot.run.console import make_reporter
    from upshot.verl.launch import launch

    path = launch(recipe, theirs, lambda line: None, make_reporter(args.quiet, args.json), folder)
    if not args.json:
        print(path if args.quiet else f"run folder  {path}\nreport      {path / 'report.html'}")
    return 0


def _load_recipe(args: argparse.Namespace) -> tuple[Recipe, Sequence[str], RunFolder | None]:
    """The recipe to run, the overrides for verl (if verl runs it) and, when resuming, the run folder."""
    on_verl = args.engine == "verl"
    if args.resume:
        return _reopen(args, on_verl)
    if not args.recipe:
        raise UserError("name a recipe; `upshot recipe list` shows those that ship with the project")
    from upshot.config.load import load_recipe
    from upshot.verl.plan import is_theirs

    theirs = [word for word in args.overrides if on_verl and is_theirs(word)]
    recipe_words = [word for word in args.overrides if word not in theirs]
    return load_recipe(args.recipe, recipe_words).recipe, theirs, None


def _reopen(args: argparse.Namespace, on_verl: bool) -> tuple[Recipe, Sequence[str], RunFolder]:
    """The same for a run to resume, which has its own recipe."""
    from upshot.run.folder import RunFolder
    from upshot.run.resume import resumed_recipe
    from upshot.verl.checkpoints import refuse_verl, reopen_run

    if args.recipe and "=" not in args.recipe:
        raise UserError(f"--resume uses the folder's own recipe; leave out '{args.recipe}'")
    words = [*([args.recipe] if args.recipe else []), *args.overrides]
    if on_verl:
        return reopen_run(Path(args.resume), words)
    folder = RunFolder.open(Path(args.resume))
    refuse_verl(folder)
    return resumed_recipe(folder, words), [], folder
