"""`upshot eval user FILE`: how similar is a simulated user to the people of real transcripts?

It is called wherever the real user spoke or left, with what had really been said by then. So both react to the same
words, and are compared transcript by transcript: length, initiative, information per turn, leaving, and whether a
classifier can distinguish them. `user_report.py` has the measures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from upshot.core.conversation import Conversation, Row, Turn, derive_seed
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score, describe_missing
from upshot.core.time_limit import limit_call
from upshot.offline.arguments import SCRIPT, read_mapping, read_model, read_rows
from upshot.offline.job import Job, Journal, open_log
from upshot.offline.user_report import make_report, tell_report
from upshot.rollout.services import assemble
from upshot.tasks.participants.base import Participant, users
from upshot.tasks.users.transcripts import Transcript, transcript_of
from upshot.tasks.verifiers.base import BadRow


def run(args: argparse.Namespace) -> int:
    """Print the comparison; 1 if there is nothing to compare."""
    report, lines = compare(args)
    print(json.dumps(report) if args.json else "\n".join(lines))
    return 0 if report["transcripts"] else 1


def compare(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Let the simulated user speak in place of the real ones; returns the comparison as data and as lines of text."""
    transcripts = read_transcripts(args.file, args.limit)
    out = Path(args.out or f"{args.file}.user.jsonl")
    settings = {"user": args.user, "as": args.kind, "with": args.settings, "seed": args.seed}
    with open_log(out, settings) as log, Journal(out, keep=lambda line: "missing" not in line) as results:
        lines = {line["transcript"]: line for line in results.lines}
        asyncio.run(_ask_all(Job("transcripts", args, log, results), transcripts, lines))
    played = [lines[number] for number in range(len(transcripts))]
    report = make_report([line for line in played if "missing" not in line], args.seed)
    failed = [Score.from_dict(line) for line in played if "missing" in line]
    report |= {"missing": len(failed), "file": str(out)}
    missing = [f"  missing {line}" for line in describe_missing(failed)]
    return report, [*tell_report(args.file, report), *missing, f"every turn is in {out}"]


def read_transcripts(file: str, limit: int | None) -> list[Transcript]:
    """The conversations of a file; an invalid row is a `UserError` before any model is called."""
    transcripts = []
    for number, record in enumerate(read_rows(file, limit), 1):
        try:
            transcripts.append(transcript_of(record))
        except BadRow as why:
            raise UserError(f"{file}, row {number}: {why}; a row is a conversation with role and content") from why
    return transcripts


async def _ask_all(job: Job, transcripts: Sequence[Transcript], lines: dict[int, dict[str, Any]]) -> None:
    todo = [number for number in range(len(transcripts)) if number not in lines]
    if not todo:
        return
    args = job.args
    options = read_mapping(args.settings, "the user's options") if args.settings else {}
    specs = {} if args.user == SCRIPT else {"user": read_model(args.user)}
    async with assemble(None, specs, budget=job.budget) as services:
        kind = "scripted" if args.user == SCRIPT else args.kind
        user = users.create(kind, options, "--as", models=services.models, task=None)

        async def one(number: int) -> None:
            try:
                line = await compare_turns(user, transcripts[number], number, args.seed)
                failure = None
            except UserError:
                raise
            except Exception as error:
                score = Score.failed(error, "user")
                # If the user says nothing, that is a result; only calls that fail for other reasons end the job.
                line, failure = score.to_dict(), None if score.reason is Reason.BAD_ANSWER else str(score.reason)
            lines[number] = {"transcript": number, **line}
            job.write(lines[number], failure=failure)

        await job.run(todo, one, len(transcripts) - len(todo))


async def compare_turns(user: Participant, transcript: Transcript, number: int, seed: int) -> dict[str, Any]:
    """The words of the real and of the simulated user in each user turn; None: it left."""
    turns, persona = [], ""
    messages = transcript.messages
    places = [at for at, message in enumerate(messages) if message.role == "user" and (at or transcript.told)]
    for at in [*places, *([len(messages)] if messages[-1].role == "assistant" else [])]:
        meta = {"persona": transcript.persona} if transcript.persona else {}
        row = Row(f"transcript {number}", messages[:1] if at else (), transcript.goal, None, "", meta)
        before = tuple(Turn(message) for message in messages[:at])
        conversation = Conversation(row, derive_seed(seed, "eval user", number, at), turns=before)
        # A scripted user finds its place by what it has said so far; its first line may be the opening.
        spoken_before = before if transcript.told else before[1:]
        conversation.session["user"] = {"turns": sum(turn.message.role == "user" for turn in spoken_before)}
        heard = await limit_call(user, user.observe, conversation)
        spoken = " ".join(message.content for message in heard.messages)
        persona = str(heard.note.get("persona") or persona)
        real = messages[at].content if at < len(messages) else None
        context = messages[at - 1].content if at else ""
        turns.append({"real": real, "said": spoken, "left": heard.done, "heard": context})
    return {"turns": turns, "goal": transcript.goal, "opening": messages[0].content, "persona": persona}
