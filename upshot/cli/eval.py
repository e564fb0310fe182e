"""`upshot eval`: models side by side on held-out goals; the judge, a monitor and a user beside what they should be."""

from __future__ import annotations

import argparse

from upshot.cli.options import JOB, add_options, run_of
from upshot.core.thought import MARKERS


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "eval",
        help="compare models on held-out goals; `eval judge`, `eval monitor`, `eval user` look at helpers",
        description="Play whole conversations on held-out goals and print the table.",
        epilog="`upshot eval judge FILE` reports how well a judge agrees with labelled rows, `upshot eval monitor "
        "RUN|FILE` how well a model that reads question and thought only predicts the verifier's score, `upshot eval "
        "user FILE` how much a simulated user is like real ones.",
    )
    add_table(parser)


def inner_parser(verb: str) -> argparse.ArgumentParser:
    """The parser of `upshot eval judge`, `upshot eval monitor` or `upshot eval user`."""
    parser = argparse.ArgumentParser(prog=f"upshot eval {verb}")
    INNER[verb](parser)
    return parser


def add_table(parser: argparse.ArgumentParser) -> None:
    """The options of the table."""
    add = parser.add_argument
    add("--task", metavar="NAME|FILE", help="math-hard, medium, bigcodebench, abg-coqa, or a file of goals")
    add("--models", metavar="NAME=SPEC,…", help="the rows of the table, such as base=SPEC,proactive=SPEC,trained=SPEC")
    add("--out", metavar="DIR", help="folder of table.json, table.md and rollouts.jsonl (default: eval-TASK)")
    add("--split", help="held-out goals: test, validation, train or all (default: test, else validation)")
    add("--goals", type=int, metavar="N", help="at most so many goals (default: all of the split)")
    add(
        "--system",
        action="append",
        default=[],
        metavar="NAME=PROMPT",
        help="system prompt of a row: plain, proactive, none or a text file (default: proactive for the row of that "
        "name, plain for the others)",
    )
    add_options(
        parser,
        *("goals_file", "user", "judge", "metrics", "tokenizer", "max_messages", "max_tokens", "temperature", "seed"),
        *(*JOB, "json"),
        user={"help": "the simulated user's model, or 'script' for lines of the goal"},
        metrics={"help": "metrics, the task metric first (default: the task's own)"},
        tokenizer={"help": "whose tokens token_amount counts (default: as each endpoint counts)"},
    )
    parser.set_defaults(run=run_of("offline.evaluate"))


def add_judge(parser: argparse.ArgumentParser) -> None:
    """The options of `upshot eval judge`."""
    parser.description = "How well a judge agrees with labelled conversations."
    add = parser.add_argument
    add("file", help="labelled conversations: 'messages', 'goal', 'reference' and a label in each row")
    add("--metric", default="accuracy", help="the judged metric: accuracy, interactivity, judged (accuracy)")
    add("--rubric", help="a rubric template (.j2) instead of the metric's own")
    add("--label", default="label", help="the column with the right rating (label)")
    add("--threshold", type=float, default=0.5, help="from where a rating counts as yes (0.5)")
    add("--out", metavar="FILE", help="write every verdict to this .jsonl file")
    add_options(parser, "judge", "limit", "at_once", judge={"required": True})
    parser.set_defaults(run=run_of("offline.judge"))


def add_user(parser: argparse.ArgumentParser) -> None:
    """The options of `upshot eval user`."""
    parser.description = (
        "How much a simulated user is like the people of real transcripts: it is asked wherever they spoke, with what "
        "had really been said by then. FILE is .jsonl, .json, .parquet or .csv with 'messages' (role, content) and, "
        "where it is known, 'goal' and 'persona' in each row. The same command continues where it stopped."
    )
    add = parser.add_argument
    add("file", help="real conversations")
    add("--as", dest="kind", default="plain", metavar="NAME", help="the kind of user: plain, llm, my_pkg.mod:User")
    add("--with", dest="settings", metavar="{…}", help="its options: '{persona: mixed, noise: 0.05}'")
    add("--out", metavar="FILE", help="every turn, one line a transcript (FILE.user.jsonl)")
    add_options(
        parser,
        "user",
        "limit",
        "seed",
        *JOB,
        "json",
        user={"required": True, "help": "the user's model, or 'script' for lines of the goal"},
    )
    parser.set_defaults(run=run_of("offline.user"))


def add_monitor(parser: argparse.ArgumentParser) -> None:
    """The options of `upshot eval monitor`."""
    parser.description = (
        "A model reads question and thought only, and predicts the verifier's score: how readable are the thoughts? "
        "RUN is a run folder (its rollouts.jsonl; a table by step and task). FILE is .jsonl, .json, .parquet or .csv; "
        "a row has a prompt (or question), a thought (or a response with think markers), and a score from 0 to 1 (or "
        "data_source, response and reference, to be verified first). The same command continues where it stopped."
    )
    add = parser.add_argument
    add("source", metavar="RUN|FILE", help="a run folder, or a file of rows with thoughts")
    add("--task", metavar="NAME", help="a run: only this task's replies; a file: whose verifier decides (data_source)")
    add("--think", nargs=2, default=list(MARKERS), metavar=("OPEN", "CLOSE"), help="a file: markers of thoughts")
    add("--out", metavar="FILE", help="every prediction, one line a reply (RUN/monitor.jsonl, FILE.monitor.jsonl)")
    more = "also predict from the question alone and from the answer alone: three calls a reply"
    add("--baselines", action="store_true", help=more)
    add_options(parser, "judge", "option", "sandbox", "limit", *JOB, "json", judge={"required": True})
    parser.set_defaults(run=run_of("offline.monitor"))


INNER = {"judge": add_judge, "monitor": add_monitor, "user": add_user}
"""The verbs below `upshot eval`."""
