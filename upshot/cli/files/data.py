"""Prepare training data, or build it by simulation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from upshot.cli.options import JOB, add_options, add_parts, count, run_of

if TYPE_CHECKING:
    from upshot.offline.data.prepare import PrepareSummary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verbs below it."""
    add_parts(parser, prepare=add_prepare, build=add_build)


def add_prepare(parser: argparse.ArgumentParser) -> None:
    """Turn files or a Hub dataset into parquet files for sft, rl, dpo or a simulated user.

    Write {sft,rl,dpo,user}_{train,validation}.parquet, split by goal, and report what was dropped and why. user: chat
    transcripts with the roles swapped, for training a simulated user.
    """
    add = parser.add_argument
    sources = "a .jsonl, .json, .parquet or .csv file, a folder (also of save_to_disk), or a Hugging Face name"
    add("--dataset", required=True, metavar="SOURCE", help=sources)
    add("--for", dest="purpose", required=True, choices=("sft", "rl", "dpo", "user"), help="what the rows are for")
    add("--out", required=True, metavar="DIR", help="folder of the parquet files")
    tasks = (
        "rl: the task of the rows: gsm8k, math, code, code-stdio, code-contests, dolci, mmlu-sycophancy or another "
        "task with a verifier, a behaviour (sycophancy, confidence …), or math-hard, medium … with a hidden goal "
        "(default: read from the dataset's name)"
    )
    add("--task", metavar="NAME", help=tasks)
    add("--task-desc", metavar="TEXT", help="rl: the task as described to the simulated user (default: the task's own)")
    share = "share of the goals held out, or their number (default 0.1); 0 writes no validation file"
    add("--validation", type=float, default=0.1, metavar="SHARE|N", help=share)
    gap = "dpo: smallest gap between chosen and rejected (default 0.1)"
    add("--min-gap", type=float, default=0.1, metavar="GAP", help=gap)
    least = "sft, dpo: smallest mean of a metric in what is imitated or chosen: score=0.5, accuracy=1 … (repeatable)"
    add("--min", type=_least, action="append", default=[], metavar="METRIC=VALUE", help=least)
    prompts = "plain, proactive, none or a text file (default: the record's own, else plain)"
    add("--system", metavar="PROMPT", help=prompts)
    add("--agent-name", metavar="NAME", help="rl: the agent loop that verl runs (default collabllm_agent)")
    add_options(parser, "sandbox", "seed", "json", seed={"help": "seed that chooses the goals held out"})
    parser.set_defaults(run=run_prepare)


def _least(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        return name, float(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} should read METRIC=VALUE, such as accuracy=0.5") from error


def add_build(parser: argparse.ArgumentParser) -> None:
    """Simulate conversations and score every candidate reply.

    Simulate conversations with several candidates per turn, score them by their multiturn-aware reward and keep the
    best. The same command continues where it stopped. Nothing is pushed without --push.
    """
    add = parser.add_argument
    tasks = "math-hard, medium, bigcodebench, abg-coqa, or a file of goals"
    add("--task", required=True, metavar="NAME|FILE", help=tasks)
    add("--out", required=True, metavar="DIR", help="folder of the journal and of candidates.parquet")
    prompts = "prompts of user and judge; short: a quarter of the words, for small models (default full)"
    add("--templates", choices=("full", "short"), default="full", help=prompts)
    add("--split", default="train", help="goals to use: train, validation, test or all (default train)")
    most = "play at most N conversations (default: all goals of the split)"
    add("--conversations", type=count, metavar="N", help=most)
    add("--candidates", type=count, default=4, metavar="N", help="candidate replies per turn (default 4)")
    share = "share of the candidates with the proactive prompt (default 0.5)"
    add("--proactive-share", type=float, default=0.5, metavar="SHARE", help=share)
    form = "form of that prompt: a system message, or CollabLLM's request for JSON (default system)"
    add("--proactive", choices=("system", "json"), default="system", help=form)
    plain = "share of the other candidates with the plain system prompt; the rest have none (default 1)"
    add("--system-share", type=float, default=1.0, metavar="SHARE", help=plain)
    add("--push", metavar="OWNER/NAME", help="also push the finished set to the Hugging Face Hub, as a private dataset")
    speaker = "the assistant: URL#name, provider/model, folder, smollm2-135m, scripted:NAME"
    add_options(
        parser,
        *("goals_file", "policy", "user", "judge", "metrics", "samples", "rounds", "max_messages", "max_tokens"),
        *("temperature", "tokenizer", "seed", *JOB, "json"),
        policy={"required": True, "help": speaker},
        user={"help": "the simulated user's model, or 'script' for the lines of the goal"},
        metrics={"help": "metrics of the reward (default: the task's own)"},
        at_once={"default": 32, "help": "concurrent conversations; each model also has its own concurrency limit"},
    )
    parser.set_defaults(run=run_of("offline.data.build"))


def run_prepare(args: argparse.Namespace) -> int:
    """Prepare, and print the summary."""
    import json

    from upshot.core.errors import UserError

    if args.purpose in ("rl", "user") and args.min:
        raise UserError("--min applies only to --for sft and --for dpo: other rows have no scored replies")
    summary = _prepare_verified(args) if args.purpose == "rl" and args.task else None
    if args.purpose == "user":
        from upshot.offline.data.users import prepare_user

        summary = prepare_user(args.dataset, Path(args.out), args.validation, args.seed)
    summary = summary or _prepare_candidates(args)
    if args.json:
        print(json.dumps(vars(summary), ensure_ascii=False))
    else:
        summary.print()
    return 0


def _prepare_candidates(args: argparse.Namespace) -> PrepareSummary:
    """Rows with a hidden goal, or with replies to learn from."""
    from upshot.offline.data.prepare import PrepareSettings, prepare
    from upshot.tasks.base import tasks
    from upshot.tasks.collabllm import PLAIN, system_prompt
    from upshot.tasks.datasets.parquet import AGENT_NAME

    known = ("math-hard", "medium", "bigcodebench", "abg-coqa")
    name = args.task or next((task for task in known if task in args.dataset.lower()), "collabllm")
    settings = PrepareSettings(
        purpose=args.purpose,
        validation=args.validation,
        min_gap=args.min_gap,
        least=dict(args.min),
        system=None if args.system is None else system_prompt(args.system),
        default_system=PLAIN,
        source=name,
        task_desc=args.task_desc or str(getattr(tasks.get(name, "--task"), "description", "")),
        agent_name=args.agent_name or AGENT_NAME,
        seed=args.seed,
    )
    summary = prepare(args.dataset, Path(args.out), settings)
    if args.purpose == "rl" and name == "bigcodebench":
        from upshot.run.checks.profiles import profile_files
        from upshot.tasks.collabllm import BigCodeBench

        summary.profiles = profile_files(summary.files, Path(args.out), BigCodeBench(), args.sandbox)
    return summary


def _prepare_verified(args: argparse.Namespace) -> PrepareSummary | None:
    """Rows of a task with a verifier; None if the named task has no verifier."""
    from upshot.core.errors import UserError
    from upshot.offline.data.verified import prepare_verified, verified_task
    from upshot.tasks.collabllm import system_prompt

    task = verified_task(args.task, args.seed, "" if args.system is None else system_prompt(args.system))
    if task is None:
        return None
    for flag, value in (("--agent-name", args.agent_name), ("--task-desc", args.task_desc)):
        if value:
            raise UserError(f"{flag} applies only to rows with a hidden goal; '{args.task}' has none")
    return prepare_verified(args.dataset, Path(args.out), task, args.validation, args.seed, args.sandbox)
