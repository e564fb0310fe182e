"""Compare models on held-out rows; `eval judge`, `eval monitor` and `eval user` examine helpers.

Play held-out rows with every model and print the table. With RECIPE (a name, a file or a run folder): any task, played
and scored as the recipe says; a run folder without --models is compared with the model it began from. With --task: the
paper's table of whole conversations on held-out goals. `upshot eval judge FILE` measures how well a judge agrees with
labels, `upshot eval monitor RUN|FILE` how well a model that reads only question and thought predicts the verifier's
score, `upshot eval user FILE` how closely a simulated user resembles real ones.
"""

from __future__ import annotations

import argparse

from upshot.cli.options import JOB, add_options, count, describe, run_of
from upshot.core.thought import MARKERS

run = run_of("offline.tabulate")


def inner_parser(verb: str) -> argparse.ArgumentParser:
    """The parser of `upshot eval judge`, `upshot eval monitor` or `upshot eval user`."""
    add = INNER[verb]
    parser = argparse.ArgumentParser(prog=f"upshot eval {verb}", description=describe(add.__doc__)["description"])
    parser.set_defaults(run=run_of(f"offline.{verb}"))
    add(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the table."""
    add = parser.add_argument
    named = {"nargs": "?", "help": "recipe name, file or run folder; leave it out with --task"}
    add_options(parser, "recipe", "overrides", recipe=named)
    add("--task", metavar="NAME|FILE", help="math-hard, medium, bigcodebench, abg-coqa, or a file of goals")
    add("--models", metavar="NAME=SPEC,…", help="the rows of the table, such as base=SPEC,proactive=SPEC,trained=SPEC")
    add("--out", metavar="DIR", help="folder of table.json, table.md and rollouts.jsonl (default: eval-NAME)")
    add("--split", help="held-out rows: test, validation, train or all (default: test, else validation)")
    add("--goals", "--rows", type=count, metavar="N", help="use at most N goals or rows (default: all of the split)")
    prompts = "system prompt of a row: plain, proactive, none or a text file (default: plain; proactive for that row)"
    add("--system", action="append", default=[], metavar="NAME=PROMPT", help=prompts)
    add_options(
        parser,
        *("goals_file", "user", "judge", "metrics", "tokenizer", "max_messages", "max_tokens", "temperature", "seed"),
        *(*JOB, "json"),
        user={"help": "the simulated user's model, or 'script' for the lines of the goal"},
        metrics={"help": "metrics, the task metric first (default: the task's own)"},
        tokenizer={"help": "tokenizer that token_amount counts with (default: as each endpoint counts)"},
    )
    parser.set_defaults(default_of=parser.get_default)


def add_judge(parser: argparse.ArgumentParser) -> None:
    """Measure how well a judge agrees with labelled conversations."""
    add = parser.add_argument
    add("file", help="labelled conversations: 'messages', 'goal', 'reference' and a label in each row")
    add("--metric", default="accuracy", help="the judged metric: accuracy, interactivity, judged (default accuracy)")
    add("--rubric", help="a rubric template (.j2) instead of the metric's own")
    add("--label", default="label", help="column with the right rating (default label)")
    add("--threshold", type=float, default=0.5, help="ratings from here on count as yes (default 0.5)")
    add("--out", metavar="FILE", help="write every verdict to this .jsonl file")
    add_options(parser, "judge", "limit", "at_once", judge={"required": True})


def add_user(parser: argparse.ArgumentParser) -> None:
    """Compare a simulated user with the people of real transcripts.

    Ask the simulated user wherever a person spoke, given what had really been said by then. FILE is .jsonl, .json,
    .parquet or .csv with 'messages' (role, content) and, where known, 'goal' and 'persona' in each row. The same
    command continues where it stopped.
    """
    add = parser.add_argument
    add("file", help="real conversations")
    add("--as", dest="kind", default="plain", metavar="NAME", help="the kind of user: plain, llm, my_pkg.mod:User")
    add("--with", dest="settings", metavar="{…}", help="its options: '{persona: mixed, noise: 0.05}'")
    add("--out", metavar="FILE", help="every turn, one line per transcript (default: FILE.user.jsonl)")
    model = {"required": True, "help": "the user's model, or 'script' for the lines of the goal"}
    add_options(parser, "user", "limit", "seed", *JOB, "json", user=model)


def add_monitor(parser: argparse.ArgumentParser) -> None:
    """Measure how well a model predicts the verifier's score from question and thought alone.

    How readable are the thoughts? RUN is a run folder (its rollouts.jsonl; a table by step and task). FILE is .jsonl,
    .json, .parquet or .csv; a row has a prompt (or question), a thought (or a response with think markers), and a score
    from 0 to 1 (or data_source, response and reference, which are verified first). The same command continues where it
    stopped.
    """
    add = parser.add_argument
    add("source", metavar="RUN|FILE", help="a run folder, or a file of rows with thoughts")
    add("--task", metavar="NAME", help="run: only this task's replies; file: the task whose verifier decides")
    add("--think", nargs=2, default=list(MARKERS), metavar=("OPEN", "CLOSE"), help="file: markers of thoughts")
    add("--out", metavar="FILE", help="every prediction, one line per reply (default: RUN/ or FILE.monitor.jsonl)")
    more = "also predict from the question alone and from the answer alone: three calls per reply"
    add("--baselines", action="store_true", help=more)
    add_options(parser, "judge", "option", "sandbox", "limit", *JOB, "json", judge={"required": True})


INNER = {"judge": add_judge, "monitor": add_monitor, "user": add_user}
"""The verbs below `upshot eval`."""
