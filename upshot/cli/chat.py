"""Talk to a model or to a run's best checkpoint; fork its replies and see what comes of them.

Talk to a model. /user lets the simulated user speak for you, /fork N shows N replies with their futures and rewards;
/score, /think, /save and /help do what they say. With a run folder, its best checkpoint speaks and its recipe defines
the user and the metrics.
"""

from __future__ import annotations

import argparse

from upshot.cli.options import add_options, count, run_of

run = run_of("offline.play.terminal")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    models = "a folder, run folder, URL#name, provider/model, local:NAME or smollm2-135m"
    add("model", metavar="MODEL|RUN|URL", help=models)
    add_options(parser, "overrides", overrides={"help": "keys of the run's recipe, or of --recipe"})
    add("--recipe", metavar="NAME", help="the recipe that defines user, metrics and futures (default: the run's)")
    add("--checkpoint", default="", metavar="NAME", help="of a run: a step, a name, best or last (default: best)")
    add("--max-tokens", type=count, metavar="N", help="longest reply, in tokens (default: the recipe's, else 512)")
    add("--temperature", type=float, help="sampling temperature (default: the recipe's, else 1)")
    add("--think", action="store_true", help="show thoughts from the start")
    add_options(
        parser,
        *("system", "user", "judge", "metrics", "samples", "rounds", "seed"),
        user={"help": "without a recipe: the model that plays the user, or 'script' for the sentences of /goal"},
        judge={"help": "without a recipe: the model that judges"},
        metrics={"help": "without a recipe: the metrics of /score and /fork"},
    )
