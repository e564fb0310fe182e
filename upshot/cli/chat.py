"""`upshot chat MODEL|RUN|URL`: talk to a model, let the simulated user talk, fork and score its replies."""

from __future__ import annotations

import argparse

from upshot.cli.options import add_options, count, run_of


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model or a run's best checkpoint; fork its replies and see what comes of them",
        description="Talk to a model. /user lets the simulated user talk instead, /fork N shows N replies with their "
        "futures and rewards, /score, /think, /save, /help. Of a run folder the best checkpoint speaks, and its recipe "
        "says who the user is and what is scored.",
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL|RUN|URL",
        help="a folder, run folder, URL#name, provider/model, local:NAME, smollm2-135m",
    )
    add("overrides", nargs="*", default=[], metavar="key=value", help="of the run's recipe, or of --recipe")
    add("--recipe", metavar="NAME", help="whose user, metrics and futures to use (default: the run's own)")
    add("--checkpoint", default="", metavar="NAME", help="of a run: a step, a name, best or last (default: best)")
    add("--max-tokens", type=count, metavar="N", help="most tokens of a reply (default: the recipe's, else 512)")
    add("--temperature", type=float, help="of the model (default: the recipe's, else 1)")
    add("--think", action="store_true", help="show thoughts from the start")
    add_options(
        parser,
        *("system", "user", "judge", "metrics", "samples", "rounds", "seed"),
        user={"help": "without a recipe: the model that plays the user, or 'script' for the sentences of /goal"},
        judge={"help": "without a recipe: the model that judges"},
        metrics={"help": "without a recipe: metrics of /score and /fork"},
    )
    parser.set_defaults(run=run_of("offline.play.terminal"))
