"""How a run ends before its time: signals arrive between steps, and become the exit code that is expected."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from upshot.training.learner.distributed.process_group import ProcessGroup, RankStopped, until_stopped
from upshot.training.learner.distributed.ranks import Ranks


async def run_until_terminated(work: Coroutine[Any, Any, object], ranks: Ranks) -> None:
    """Train; SIGTERM, with which schedulers take machines away, cancels it: between steps, never inside an update."""
    training = asyncio.ensure_future(work)
    if isinstance(ranks, ProcessGroup):  # they agree on the update after which all stop
        await until_stopped(ranks, training)
        return
    with suppress(RuntimeError, ValueError):  # only the main thread may set handlers
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, training.cancel)
    await training


@contextmanager
def exit_as_signalled() -> Iterator[None]:
    """Inside, a run that a signal ended exits with the status that the signal would have given."""
    try:
        yield
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    except RankStopped as error:
        if error.signal == signal.SIGINT:
            raise KeyboardInterrupt from None
        if error.signal:
            raise SystemExit(128 + error.signal) from None
        raise
