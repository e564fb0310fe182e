"""The job behind the batch verbs: bounded, in order, resumable, with one budget over all runs, stopped by an outage."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from upshot.core.errors import UserError
from upshot.offline.arguments import read_metrics
from upshot.offline.job import Job, Journal, open_log, progress, run_all


def options(**more: Any) -> argparse.Namespace:
    usual: dict[str, Any] = {"at_once": 4, "max_calls": None, "max_dollars": None, "call_seconds": 1.0, "quiet": True}
    return argparse.Namespace(**usual | more)


def test_results_keep_the_order_of_the_pieces_and_concurrency_is_bounded() -> None:
    busy, busiest = 0, 0

    async def work(piece: int) -> int:
        nonlocal busy, busiest
        busy += 1
        busiest = max(busiest, busy)
        await asyncio.sleep(0.001 * (piece % 3))
        busy -= 1
        return piece * 2

    assert asyncio.run(run_all(range(20), work, 3)) == [2 * piece for piece in range(20)]
    assert busiest == 3
    assert asyncio.run(run_all([], work, 3)) == []


def test_a_user_error_leaves_the_task_group_unwrapped() -> None:
    async def work(piece: int) -> None:
        await asyncio.sleep(0)
        raise UserError("no such key") if piece == 1 else ValueError("other")

    with pytest.raises(UserError, match="no such key"):
        asyncio.run(run_all(range(3), work, 3))


def play(out: Path, todo: int, failure: Callable[[int], str | None] = lambda piece: None, **more: Any) -> Job:
    """Pieces 0 … todo−1 that cost a call each, after those already done; the job."""
    with open_log(out, {"a": 1}) as log, Journal(out, keep=lambda line: line["failed"] is None) as results:
        job = Job("pieces", options(**more), log, results)
        done = {line["piece"] for line in results.lines}

        async def work(piece: int) -> None:
            await asyncio.sleep(0)
            job.budget.take_call()
            job.write({"piece": piece, "failed": failure(piece)}, failure=failure(piece))

        asyncio.run(job.run([piece for piece in range(todo) if piece not in done], work, len(done)))
        return job


def pieces(out: Path) -> list[int]:
    return sorted(json.loads(line)["piece"] for line in out.read_text().splitlines())


def test_a_job_resumes_after_finished_pieces_and_counts_earlier_spending(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(UserError, match="budget of 5 calls is used up"):
        play(out, 9, max_calls=5)
    assert len(pieces(out)) == 5
    with pytest.raises(UserError, match="budget of 5 calls is used up"):
        play(out, 9, max_calls=5)
    assert play(out, 9).budget.calls == 9 and pieces(out) == list(range(9))


def test_only_failed_pieces_are_tried_again(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    play(out, 6, lambda piece: "timeout" if piece == 2 else None)
    assert play(out, 6).budget.calls == 7 and pieces(out) == list(range(6))


def test_a_call_in_flight_when_the_job_stops_is_counted_by_the_next_run(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with open_log(out, {"a": 1}) as log, Journal(out) as results:
        job = Job("pieces", options(), log, results)

        async def work(piece: int) -> None:
            job.budget.take_call()
            raise UserError("stopped")

        with pytest.raises(UserError):
            asyncio.run(job.run([0], work))
    assert play(out, 1).budget.calls == 2


def test_too_many_failures_stop_a_job_with_the_commonest_reason(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(UserError, match="11 of the last 20 pieces failed, mostly: connection"):
        play(out, 99, lambda piece: "connection" if piece >= 9 else None, at_once=1)
    assert len(pieces(out)) == 20


def test_results_of_a_killed_job_are_not_reused_for_other_settings(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with open_log(out, {"a": 1}) as log, Journal(out) as results:  # killed after its first result: nothing is reported
        Job("pieces", options(), log, results).write({"piece": 0})
    with pytest.raises(UserError, match="started with other settings"):
        open_log(out, {"a": 2})
    with open_log(tmp_path / "new.jsonl", {"a": 1}):
        pass
    open_log(tmp_path / "new.jsonl", {"a": 2}).close()  # nothing was done with the other settings


@pytest.mark.parametrize(
    ("texts", "metrics"),
    [
        (["accuracy"], {"accuracy": 1.0}),
        (["accuracy=2", "code->pass_rate=0.5"], {"accuracy": 2.0, "code->pass_rate": 0.5}),
        (["accuracy=1, token_amount=-1e-4"], {"accuracy": 1.0, "token_amount": -1e-4}),
        (["bleu={weight: 2, clamp: null}"], {"bleu": {"weight": 2, "clamp": None}}),
        (["{bleu: {weight: 2}, accuracy: 1}"], {"bleu": {"weight": 2}, "accuracy": 1}),
    ],
)
def test_metrics_are_read_in_every_form_by_every_verb(texts: list[str], metrics: dict[str, Any]) -> None:
    assert read_metrics(texts) == metrics


def test_the_time_left_is_shown_once_the_first_batch_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("rows", 4000, 0, quiet=False, at_once=16) as advance:
        advance()
        assert capsys.readouterr().err == "rows: 1 of 4000\n", "the first of sixteen says nothing about the pace"
        for _ in range(14):
            advance()
        assert capsys.readouterr().err == ""
        advance()
        assert re.fullmatch(r"rows: 16 of 4000, about .* left\n", capsys.readouterr().err)
