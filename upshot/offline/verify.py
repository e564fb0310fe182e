"""`upshot verify FILE`: scores responses against their references, or serves verdicts over HTTP. Rows fail alone."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import Named
from upshot.core.errors import UserError, did_you_mean
from upshot.core.files import check_writable, write_jsonl
from upshot.core.score import Reason, Score, describe_missing
from upshot.offline.arguments import read_model, read_rows
from upshot.offline.job import run_all
from upshot.rollout.services import Services, assemble
from upshot.tasks.datasets.records import columns_of, extra_of, first, reference_of
from upshot.tasks.verifiers.base import Claim, Verifier, verifiers
from upshot.tasks.verifiers.judged import with_rubric_read
from upshot.tasks.verifiers.profile_store import VerdictMode, profiles_beside
from upshot.tasks.verifiers.routes import route

SECONDS = 10.0
"""The default time limit of one item."""
DRAIN_S = 10
"""How long verdicts in progress may take when the server stops."""


@dataclass(frozen=True)
class VerifySettings:
    """How to verify."""

    task: str | None = None
    mode: str | None = None
    options: Sequence[str] = ()
    """KEY=VALUE pairs."""
    manager: str = "inline"
    url: str | None = None
    workers: int | None = None
    seconds: float | None = None
    """Time limit of one item; None: 10, or for a judge's verdict the limit of its endpoint."""
    judge: str | None = None
    sandbox: str = "local"
    verdict: VerdictMode = "profile"
    file: str | None = None
    """The rows; their profiles are kept beside it."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> VerifySettings:
        """The settings in a verb's options; a verb need not have all of them."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls) if hasattr(args, field.name)})


def run(args: argparse.Namespace) -> int:
    """Score every row of a file and print the summary; 1 if no row got a score. Or serve verdicts."""
    settings = VerifySettings.of(args)
    if args.serve:
        return serve(settings, args.host, args.port, args.api_key_file)
    if not args.file:
        raise UserError("upshot verify needs a FILE (or --serve)")
    rows = read_rows(args.file, args.limit)
    if args.out:
        check_writable(Path(args.out))
    claims = [claim_of(row, settings, number, args.file) for number, row in enumerate(rows, 1)]
    unknown = find_unknown(claims) if not settings.task else {}
    for source in dict.fromkeys(claim.source for claim in claims if claim.source not in unknown):
        check_verifier(source, options_of(settings), settings)
    start = time.perf_counter()
    scores = asyncio.run(_verify_all(claims, settings, unknown, args.at_once))
    summary = summarise(claims, scores) | {"seconds": round(time.perf_counter() - start, 3)}
    if args.out:
        parts = [{name: part for name, part in score.to_dict().items() if name != "value"} for score in scores]
        scored = zip(rows, scores, parts, strict=True)
        write_jsonl(Path(args.out), ({**row, "score": score.value, **part} for row, score, part in scored))
    missing = "".join(f"\n  missing {line}" for line in describe_missing(scores))
    text = f"{show(summary)}{missing}".encode("utf-8", "backslashreplace").decode()  # terminals reject lone surrogates
    print(json.dumps(summary) if args.json else text)
    return 0 if summary["scored"] else 1


def find_unknown(claims: Sequence[Claim]) -> dict[str, Score]:
    """The missing score of each source without a verifier; `UserError` if no source has one."""
    out: dict[str, Score] = {}
    sources = dict.fromkeys(claim.source for claim in claims)
    for source in sources:
        try:
            verifiers.get(source, "data_source")
        except UserError as error:
            out[source] = Score.missing(Reason.BAD_ROW, str(error))
    if len(out) == len(sources):
        raise UserError(next(iter(out.values())).why)
    return out


def serve(settings: VerifySettings, host: str, port: int, key_file: str | None = None) -> int:
    """Answer `POST /verify` until stopped."""
    from upshot.core.http_listener import listen, serve_app
    from upshot.core.http_server import demand_key, find_key
    from upshot.rewards.workers.scorer import KEY_VARIABLE, scorer_app

    key = find_key(key_file, KEY_VARIABLE)
    demand_key(host, key, f"set {KEY_VARIABLE} or --api-key-file")
    if settings.manager == "inline":
        settings = replace(settings, manager="pool")

    async def answer(listener: socket.socket) -> None:
        async with build_manager(settings) as services:
            print(f"verdicts at http://{host}:{listener.getsockname()[1]} (POST /verify, GET /health)", flush=True)
            await serve_app(scorer_app(services.manager, key), listener, DRAIN_S)

    with listen(host, port) as listener:
        asyncio.run(answer(listener))
    return 0


def check_verifier(source: str, options: Mapping[str, Any], settings: VerifySettings) -> None:
    """Refuse an unknown verifier, option or a judged verifier without a judge, before any work."""
    verifiers.check(source, options, "--task", judge=None, sandbox=None, models=None)
    if _is_judged(source) and settings.judge is None and settings.manager != "remote":
        raise UserError(f"'{source}' is judged by a model: give --judge URL or provider/model")


def _is_judged(source: str) -> bool:
    kind = verifiers.get(source) if source in verifiers or ":" in source else None
    return isinstance(kind, type) and issubclass(kind, Verifier) and "judge" in kind.needs


def claim_of(row: Mapping[str, Any], settings: VerifySettings, number: int, file: str) -> Claim:
    """The item to verify in a row of a file; `UserError` if the row lacks something."""
    response = response_of(row)
    if response is None:
        raise UserError(f"{file}, row {number} has no 'response' text; it has {columns_of(row)}")
    source = source_of(row, settings)
    if not source:
        raise UserError(f"{file}, row {number} names no data_source; add --task NAME")
    used = ("response", "completion", "ground_truth")
    extra = {key: value for key, value in extra_of(row).items() if key not in used}
    extra |= {key: row[key] for key in ("prompt", "messages") if row.get(key) is not None}
    if "prompt" not in extra and isinstance(extra.get("messages"), list):
        # The verifier reads from the prompt how the answer was requested; the response does not say so.
        extra["prompt"] = [m for m in extra["messages"] if m.get("content") != response]
    options = options_of(settings)
    if settings.seconds is not None and _is_judged(source):
        options.setdefault("seconds", settings.seconds)
    return Claim(source, response, reference_of(row), extra, options)


def response_of(row: Mapping[str, Any]) -> str | None:
    """The response of a row: a column, or the assistant's last message; None if there is none."""
    response = first(row, ("response", "completion"))
    if response is None and isinstance(row.get("messages"), list):
        response = next((m.get("content") for m in reversed(row["messages"]) if m.get("role") == "assistant"), None)
    return response if isinstance(response, str) else None


def source_of(row: Mapping[str, Any], settings: VerifySettings) -> str:
    """The verifier of a row: the requested one, or else the one that the row names; '' if it names none."""
    return verifier_of(settings.task) if settings.task else route(row, str(row.get("data_source") or ""))


def verifier_of(name: str) -> str:
    """The verifier behind the name of a verifier or a task."""
    if name in verifiers or ":" in name:
        return name
    from upshot.tasks.base import tasks

    if name in tasks:
        verifier = getattr(tasks.get(name), "verifier", "")
        if verifier:
            return str(verifier)
        raise UserError(f"task '{name}' has no verifier that works on a file of responses")
    known = sorted({*verifiers.names(), *tasks.names()})
    raise UserError(f"unknown task or verifier '{name}'; {did_you_mean(name, known)}")


def options_of(settings: VerifySettings) -> dict[str, Any]:
    """Constructor options of the verifiers."""
    out: dict[str, Any] = {"mode": settings.mode} if settings.mode else {}
    for pair in settings.options:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--option '{pair}' should read KEY=VALUE")
        try:
            out[key] = json.loads(value)
        except json.JSONDecodeError:
            out[key] = value
    return with_rubric_read(out)


def build_manager(settings: VerifySettings) -> Services:
    """The manager, with judge and sandbox; not yet started."""
    judge = {"judge": _judge_spec(settings.judge, settings.seconds)} if settings.judge else {}
    options: dict[str, Any] = {"seconds": settings.seconds or SECONDS}
    if settings.manager == "remote":
        if not settings.url:
            raise UserError("--manager remote needs --url")
        options["url"] = settings.url
    else:
        options["workers"] = settings.workers or len(os.sched_getaffinity(0))
    manager, sandbox = Named.model_validate({"name": settings.manager, **options}), settings.sandbox
    profiles = profiles_beside(settings.file) if settings.file else None
    return assemble(None, judge, manager=manager, sandbox=sandbox, verdict=settings.verdict, profiles=profiles)


def _judge_spec(judge: str, seconds: float | None) -> ModelSpec:
    """The judge's endpoint; the check that it answers takes no longer than one item may."""
    spec = ModelSpec.parse(read_model(judge))
    return spec if seconds is None else spec.model_copy(update={"timeout_s": min(spec.timeout_s, seconds)})


async def _verify_all(
    claims: Sequence[Claim], settings: VerifySettings, unknown: Mapping[str, Score], at_once: int
) -> list[Score]:
    if settings.judge:  # waiting for the judge must not count against a row's time limit
        at_once = min(at_once, _judge_spec(settings.judge, None).concurrency)
    async with build_manager(settings) as services:

        async def one(claim: Claim) -> Score:
            return unknown.get(claim.source) or await services.manager.verify(claim)

        return await run_all(claims, one, at_once)


def summarise(claims: Sequence[Claim], scores: Sequence[Score]) -> dict[str, Any]:
    """Accuracy over the rows that have a score, and the number of missing ones, overall and by verifier."""
    by_task: dict[str, list[Score]] = {}
    for claim, score in zip(claims, scores, strict=True):
        by_task.setdefault(claim.source, []).append(score)
    tasks = {name: _summary(by_task[name]) for name in sorted(by_task)}
    return _summary(scores) | ({"by_task": tasks} if len(tasks) > 1 else {})


def _summary(scores: Sequence[Score]) -> dict[str, Any]:
    values = [score.value for score in scores if score.value is not None]
    reasons = Counter(str(score.reason) for score in scores if score.value is None)
    return {
        "rows": len(scores),
        "scored": len(values),
        "accuracy": sum(values) / len(values) if values else None,
        "missing": dict(sorted(reasons.items())),
    }


def show(summary: Mapping[str, Any]) -> str:
    """The summary for a reader."""
    rate = f" ({summary['rows'] / summary['seconds']:,.0f} rows/s)" if summary["seconds"] > 0 else ""
    lines = [_line(name, part) for name, part in summary.get("by_task", {}).items()]
    return "\n".join([_line("all", summary) + rate, *lines])


def _line(name: str, part: Mapping[str, Any]) -> str:
    accuracy = "no scores" if part["accuracy"] is None else f"accuracy {part['accuracy']:.4f}"
    return f"{name}: {accuracy} over {part['scored']} of {part['rows']} rows"
