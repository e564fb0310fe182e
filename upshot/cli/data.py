"""`upshot data prepare` and `upshot data build`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from upshot.config.renamed import refuse_old_options
from upshot.offline.data.arguments import add_call_seconds

if TYPE_CHECKING:
    from upshot.offline.data.prepare import PrepareSummary


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb and its two halves."""
    parser = subparsers.add_parser(
        "data", help="prepare training data, or build it by simulation", description="Prepare or build training data."
    )
    halves = parser.add_subparsers(dest="half", metavar="prepare|build", required=True)
    _add_prepare(halves)
    _add_build(halves)


def _add_prepare(halves: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = halves.add_parser(
        "prepare",
        help="files or a Hub set → parquet for sft, rl or dpo",
        description="Write {sft,rl,dpo}_{train,validation}.parquet, split by goal, and say what was dropped and why.",
    )
    add = parser.add_argument
    add(
        "--dataset",
        required=True,
        metavar="SOURCE",
        help="a .jsonl, .json, .parquet or .csv file, a folder (save_to_disk, too), or a Hugging Face name",
    )
    add("--for", dest="purpose", required=True, choices=("sft", "rl", "dpo"), help="what the rows are for")
    add("--out", required=True, metavar="DIR", help="folder of the parquet files")
    add(
        "--task",
        metavar="NAME",
        help="rl: whose rows they are: gsm8k, math, code, code-stdio, code-contests, dolci, mmlu-sycophancy or another "
        "task with a verifier, a behaviour (sycophancy, confidence …), or math-hard, medium … with a hidden goal; "
        "default: read off the dataset's name",
    )
    add("--task-desc", metavar="TEXT", help="rl: what the simulated user is told the task is (default: the task's own)")
    add(
        "--validation",
        type=float,
        default=0.1,
        metavar="SHARE|N",
        help="share of the goals held out, or how many of them (default 0.1); 0 writes no validation file",
    )
    add(
        "--min-gap",
        type=float,
        default=0.1,
        metavar="GAP",
        help="dpo: least gap between chosen and rejected (default 0.1)",
    )
    add(
        "--min",
        type=_least,
        action="append",
        default=[],
        metavar="METRIC=VALUE",
        help="sft, dpo: least mean of a metric of what is imitated or chosen: score=0.5, accuracy=1 … (repeatable)",
    )
    add(
        "--system",
        metavar="PROMPT",
        help="plain, proactive, none or a text file; default: the record's own, else plain",
    )
    add("--agent-name", metavar="NAME", help="rl: the agent loop that verl runs (default collabllm_agent)")
    add("--seed", type=int, default=0, help="which goals are held out (default 0)")
    add("--json", action="store_true", help="print the summary as one line of JSON")
    parser.set_defaults(run=run)


def _least(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        return name, float(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} should read METRIC=VALUE, such as accuracy=0.5") from error


def _add_build(halves: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = halves.add_parser(
        "build",
        help="simulate conversations and score every candidate reply",
        description="Simulate conversations with several candidates a turn, score them by multiturn-aware reward, "
        "keep the best. Resumes where it stopped; nothing is pushed unless --push.",
    )
    add = parser.add_argument
    add(
        "--task",
        required=True,
        metavar="NAME|FILE",
        help="math-hard, medium, bigcodebench, abg-coqa, or a file of goals",
    )
    add(
        "--file",
        metavar="SOURCE",
        help="the task's single-turn data: a file, folder or Hub name (default: the task's own set)",
    )
    add("--out", required=True, metavar="DIR", help="folder of the journal and of candidates.parquet")
    add(
        "--policy",
        required=True,
        metavar="SPEC",
        help="the assistant: a URL, provider/model, folder, smollm2-135m or scripted:NAME",
    )
    add("--user", metavar="SPEC", help="the simulated user's model, or 'script' for lines of the goal")
    add("--judge", metavar="SPEC", help="the judge's model; needed by judged metrics")
    add(
        "--templates",
        choices=("full", "short"),
        default="full",
        help="prompts of user and judge; short: a quarter of the words, for small models (default full)",
    )
    add("--split", default="train", help="goals to use: train, validation, test or all (default train)")
    add(
        "--conversations", type=int, metavar="N", help="at most so many conversations (default: all goals of the split)"
    )
    add("--candidates", type=int, default=4, metavar="N", help="candidate replies a turn (default 4)")
    add(
        "--proactive-share",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="share of the candidates with the proactive prompt (default 0.5)",
    )
    add(
        "--proactive",
        choices=("system", "json"),
        default="system",
        help="form of that prompt: a system message, or CollabLLM's request for JSON (default system)",
    )
    add(
        "--system-share",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of the other candidates with the plain system prompt; the rest have none (default 1)",
    )
    add("--samples", type=int, default=3, help="futures a candidate (default 3)")
    refuse_old_options(parser)
    add("--rounds", type=int, default=2, help="rounds a future lasts (default 2)")
    add("--max-messages", type=int, metavar="N", help="most messages of a conversation (default 14)")
    add("--metrics", metavar="NAME=WEIGHT,…", help="metrics of the reward (default: the task's own)")
    add("--tokenizer", metavar="NAME", help="whose tokens token_amount counts, where the policy is no local model")
    add("--max-tokens", type=int, default=1024, help="most tokens of a reply (default 1024)")
    add("--temperature", type=float, default=1.0, help="of the replies (default 1.0)")
    add(
        "--concurrency",
        type=int,
        default=32,
        help="conversations at once (default 32); calls are bounded by each model's own limit",
    )
    add("--max-calls", type=int, help="stop, resumably, after so many model calls")
    add("--max-dollars", type=float, help="stop, resumably, when so much is spent")
    add_call_seconds(parser)
    add("--seed", type=int, default=0)
    add("--push", metavar="OWNER/NAME", help="also push the finished set to the Hugging Face Hub, as a private dataset")
    add("--quiet", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="print the summary as one line of JSON; no progress bar")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prepare or build, and print the summary."""
    return _prepare(args) if args.half == "prepare" else _build(args)


def _prepare(args: argparse.Namespace) -> int:
    from pathlib import Path

    from upshot.core.errors import UserError
    from upshot.offline.data.prepare import PrepareSettings, prepare
    from upshot.tasks.collabllm import PLAIN, system_prompt
    from upshot.tasks.datasets.parquet import AGENT_NAME

    if args.purpose == "rl" and args.min:
        raise UserError("--min is for sft and dpo: an rl row is a prompt, and no reply is taken from it")
    if args.purpose == "rl" and args.task:
        summary = _prepare_verified(args)
        if summary is not None:
            return _tell(summary, args.json)
    name, description = _task_of(args.task, args.dataset)
    settings = PrepareSettings(
        purpose=args.purpose,
        validation=args.validation,
        min_gap=args.min_gap,
        least=dict(args.min),
        system=None if args.system is None else system_prompt(args.system),
        default_system=PLAIN,
        source=name,
        task_desc=args.task_desc or description,
        agent_name=args.agent_name or AGENT_NAME,
        seed=args.seed,
    )
    return _tell(prepare(args.dataset, Path(args.out), settings), args.json)


def _prepare_verified(args: argparse.Namespace) -> PrepareSummary | None:
    """Rows of a task with a verifier; None where the task named is none."""
    from pathlib import Path

    from upshot.core.errors import UserError
    from upshot.offline.data.verified import prepare_verified, verified_task
    from upshot.tasks.collabllm import system_prompt

    system = "" if args.system is None else system_prompt(args.system)
    task = verified_task(args.task, args.seed, system)
    if task is None:
        return None
    for flag, given in (("--agent-name", args.agent_name), ("--task-desc", args.task_desc)):
        if given:
            raise UserError(f"{flag} is for rows with a hidden goal; those of '{args.task}' have none")
    return prepare_verified(args.dataset, Path(args.out), task, args.validation, args.seed)


def _tell(summary: PrepareSummary, as_json: bool) -> int:
    import json

    if as_json:
        print(json.dumps(summary.to_dict(), ensure_ascii=False))
        return 0
    from rich.console import Console

    from upshot.offline.data.summary import print_summary

    print_summary(summary, Console(markup=False))
    return 0


def _task_of(named: str | None, dataset: str) -> tuple[str, str]:
    """Name and description of the task that a dataset belongs to."""
    from upshot.tasks.base import tasks

    known = ("math-hard", "medium", "bigcodebench", "abg-coqa")
    name = named or next((task for task in known if task in dataset.lower()), "collabllm")
    task = tasks.get(name, "--task")
    return name, str(getattr(task, "description", ""))


def _build(args: argparse.Namespace) -> int:
    from upshot.offline.data.build_command import run as build

    return build(args)
