"""Several processes of one machine that train one model, as `torchrun` starts them. The interface: `ranks.py`.

Two ways lead from rank to rank. Tensors are summed and sent by torch's collectives, but only while all ranks update
the weights or save: who takes part in those waits blindly. Objects are handed over through the store that `torchrun`
keeps (a TCPStore), and not by torch's own all_gather_object, for two reasons. The store can be asked without waiting:
whoever waits there notices that the run is to stop, or that a rank is gone, and an event loop goes on meanwhile. And
collectives must come in one order on all ranks, but steps that are played ahead end in any order, beside the learner.

A run stops between the same two updates on all ranks. Before each update the ranks agree, by one entry of the store
that the first to write decides: 'go', or the reason to stop. A rank that receives a signal or fails tries to make the
entry of the next update such a reason. If another rank has entered 'go' there, the one after it is free, as no update
ends without this rank, and a rank that can takes part in one more.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

from upshot.core.errors import UserError, reason_of
from upshot.models.client.budget import Budget
from upshot.training.learner.distributed.pickling import dumps, loads
from upshot.training.learner.distributed.ranks import ALONE, Ranks, interleave

T = TypeVar("T")
GO = "go"
APART = "apart"
"""The entry that says that some rank has given up waiting for the others to stop."""
PIECE = 4 << 20
"""Bytes of one entry: the store takes up to eight MiB."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0002, 0.02
LOOK_SECONDS = 0.2
"""How often a rank looks whether the run is to stop."""
ARRIVE_SECONDS = 20.0
"""How long a rank that stops waits for the others to come there, too; `torchrun` kills after 30."""
GONE_SECONDS = 1.0
COLLECTIVE = timedelta(minutes=30)
"""A collective that takes longer ends the run: a rank that takes part is lost, or its disk or device stands still."""
SCALE = {"dollars": 1e9}
"""The store counts in whole numbers."""


class RankStopped(UserError):
    """The run stops because of another rank, or of a signal that one was sent."""

    def __init__(self, why: dict[str, Any]) -> None:
        super().__init__(why["reason"] if why.get("signal") else f"rank {why['rank']}: {why['reason']}")
        self.signal: int = why.get("signal", 0)


class RankLost(UserError):
    """A process of the run is gone."""


class ProcessGroup(Ranks):
    """One of several ranks. `store`: torch's, by which ranks find each other."""

    def __init__(self, store: Any, rank: int, size: int, collectives: Any = None) -> None:
        self.rank, self.size = rank, size
        self.store, self.collectives = store, collectives
        self._updates = 0
        self._updating = False
        self._wish: dict[str, Any] | None = None
        """Why this rank wants to stop."""
        self._topics: dict[str, int] = {}
        self._lock = threading.Lock()
        self._ended = False
        self.lost: RankLost | None = None
        """A rank that is gone, where that ended the run."""
        self._pids: list[int] = []
        self._pids = self.all_gather_object("pid", os.getpid())

    # Objects

    async def gather_own(self, topic: str, mine: list[T]) -> list[T]:
        """See `Ranks`."""
        key = self._post(topic, mine)
        for pause in self._pauses(key):
            await asyncio.sleep(pause)
        return interleave(self._collect(key, mine))

    def all_gather_object(self, topic: str, mine: T, seconds: float = math.inf) -> list[T]:
        """See `Ranks`; `RankLost` when a rank has posted nothing after `seconds`."""
        key = self._post(topic, mine)
        for pause in self._pauses(key, seconds):
            time.sleep(pause)
        return self._collect(key, mine)

    def _post(self, topic: str, mine: Any) -> str:
        with self._lock:
            number = self._topics[topic] = self._topics.get(topic, 0) + 1
        key, data = f"{topic}/{number}", dumps(mine)
        pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
        for i, piece in enumerate(pieces):
            self.store.set(f"{key}/{self.rank}/{i}", piece)
        self.store.set(f"{key}/{self.rank}", str(len(pieces)))  # at last: who finds it finds all pieces
        return key

    def _pauses(self, key: str, seconds: float = math.inf) -> Iterator[float]:
        """Seconds to wait before asking again for all ranks' objects; raises why there is nothing to wait for."""
        pause, started, looked = SHORTEST_PAUSE, time.monotonic(), 0.0
        for rank in range(self.size):
            while rank != self.rank and not self.store.check([f"{key}/{rank}"]):
                now = time.monotonic()
                if now - looked >= LOOK_SECONDS:
                    self.look()
                    looked = now
                if now - started > seconds:
                    raise RankLost(f"rank {rank} (process {self._pids[rank]}) did not answer within {seconds:g} s")
                yield pause
                pause = min(1.5 * pause, LONGEST_PAUSE)

    def _collect(self, key: str, mine: T) -> list[T]:
        counts = [int(self.store.get(f"{key}/{rank}")) for rank in range(self.size)]
        names = [[f"{key}/{rank}/{i}" for i in range(count)] for rank, count in enumerate(counts)]
        out = [
            mine if rank == self.rank else loads(b"".join(map(self.store.get, pieces)))
            for rank, pieces in enumerate(names)
        ]
        if self.store.add(f"{key}/read", 1) == self.size:  # the last one to read clears up
            for name in (f"{key}/read", *(f"{key}/{rank}" for rank in range(self.size)), *chain.from_iterable(names)):
                self.store.delete_key(name)
        return out

    # When to stop

    def look(self) -> None:
        """Raise `RankStopped` when the ranks have agreed to stop, `RankLost` when one is gone."""
        if not self.agreed:
            self._propose(self._wish)
            # Within an update the others wait for this rank in a collective: it takes part to the end.
            decision = None if self._updating else self._read_decision()
            if decision is not None:
                raise RankStopped(decision)
        elif self.store.check([APART]):
            raise RankLost("the ranks did not stop together; the steps since the last checkpoint are lost")
        for rank, pid in enumerate(self._pids):
            if not _alive(pid):
                raise RankLost(f"rank {rank} (process {pid}) has ended; the steps since the last checkpoint are lost")

    def _propose(self, wish: dict[str, Any] | None) -> None:
        """Have the ranks stop before the next update, or, where others have begun that, before the one after it."""
        # The store writes an entry only where there is none, and answers with the one that stands: all ranks read the
        # same decision, whoever was first. Two entries are enough: no update ends without this rank, so nobody can have
        # entered 'go' for the update after the next.
        for number in (self._updates, self._updates + 1) if wish is not None else ():
            if self.store.compare_set(f"update/{number}", "", json.dumps(wish)).decode() != GO:
                return

    def _read_decision(self) -> dict[str, Any] | None:
        """Why all ranks stop before the next update; None: they do not, or do not yet."""
        key = f"update/{self._updates}"
        entry = self.store.get(key).decode() if self.store.check([key]) else GO
        return None if entry == GO else json.loads(entry)

    @contextmanager
    def update(self) -> Iterator[None]:
        """See `Ranks`; raises `RankStopped` where the ranks have agreed on that instead."""
        self._propose(self._wish)
        entry = self.store.compare_set(f"update/{self._updates}", "", GO).decode()
        if entry != GO:
            raise RankStopped(json.loads(entry))
        self._updates += 1
        self._updating = True
        yield
        self._updating = False  # an exception leaves it on: such a rank has nothing whole to save

    def request_stop(self, number: int) -> None:
        """A signal has come."""
        name = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
        self._wish = self._wish or {"rank": self.rank, "reason": name, "signal": number}

    async def watch(self, stop: Callable[[], object]) -> RankStopped | RankLost:
        """Look from time to time; when the run is to stop, call `stop` and return why."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self.look()
            except (RankStopped, RankLost) as why:
                stop()
                return why

    def stop(self, reason: str, whole: bool) -> bool:
        """See `Ranks`."""
        if self._ended:  # by the run itself; whoever started it calls this once more
            return False
        self._ended = True
        if not self._updating:
            self._propose(self._wish or {"rank": self.rank, "reason": reason[:2000]})
        decision = None if self._updating else self._read_decision()
        # No decision: this rank failed within an update, or others are in one that it did not come to. Its weights are
        # half new or behind theirs, and nobody can wait for the others, who may hang in a collective.
        if decision is None:
            self.lost = self._find_lost()
            self.reason = str(self.lost or "")
            return False
        # From here on `look` no longer raises the decision, which this rank knows: it only watches for lost ranks.
        self.agreed = True
        self.reason = str(RankStopped(decision)) if decision["rank"] != self.rank or "signal" in decision else reason
        try:
            # All or none save: a checkpoint needs a collective, in which every rank must take part.
            arrived = self.all_gather_object("stop", whole, ARRIVE_SECONDS)
            self.look()  # another rank may have given up waiting while this one arrived
            return all(arrived)
        except (RankLost, RuntimeError) as error:  # a RuntimeError: the store itself is gone
            self.agreed = False
            with suppress(RuntimeError):
                self.store.set(APART, "yes")  # so that ranks that arrive later save nothing by themselves
            line = next(iter(str(error).splitlines()), type(error).__name__)
            self.lost = error if isinstance(error, RankLost) else RankLost(f"the ranks lost each other: {line}")
            self.reason = str(self.lost)
            return False

    def _find_lost(self) -> RankLost | None:
        """The rank whose end made a collective fail, if it was that; a process is seen to be gone a little later."""
        before = time.monotonic()
        while time.monotonic() - before < GONE_SECONDS:
            try:
                self.look()
            except RankStopped:
                return None
            except RankLost as lost:
                return lost
            time.sleep(LONGEST_PAUSE)
        return None

    # What is counted together

    def share(self, budget: Budget) -> None:
        """See `Ranks`."""
        spent, number = budget.state(), self._topics.get("budget", 0)

        def tally(what: str, amount: float) -> float:
            scale = SCALE.get(what, 1)
            return int(self.store.add(f"spent/{number}/{what}", round(amount * scale))) / scale

        for what, amount in spent.items() if self.first else ():
            tally(what, amount)
        self.barrier("budget")
        budget.tally = tally

    def leave(self) -> None:
        """The run is over for this rank; the first one leaves first, since `torchrun` ends all when one has failed.

        But a rank that failed alone leaves at once: others may wait for it in a collective.
        """
        if self._ended and not self.agreed:
            return
        with suppress(RuntimeError):  # the store may be gone with the process that kept it
            if self.first:
                self.store.set("left", "yes")
            while not self.store.check(["left"]) and _alive(self._pids[0]):
                time.sleep(LOOK_SECONDS)


async def until_stopped(ranks: ProcessGroup, training: asyncio.Future[Any]) -> None:
    """Let a run train to its end, or until the ranks agree to stop: then raise why. Signals are wishes to stop."""
    # To the end of the process, and not only of this loop: `torchrun` sends SIGTERM as soon as one rank has failed,
    # when others are still about to say why.
    with suppress(ValueError):  # only the main thread may set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: ranks.request_stop(number))
    watching = asyncio.ensure_future(ranks.watch(training.cancel))
    try:
        await training
    except BaseException as error:
        ranks.stop(reason_of(error), whole=False)  # where the run could not do so itself
        if ranks.lost is not None:
            raise ranks.lost from error
        if isinstance(error, asyncio.CancelledError) and watching.done():
            raise watching.result() from None
        raise
    finally:
        watching.cancel()


def open_ranks(device: str = "auto") -> Ranks:
    """The ranks that `torchrun` started, each with a GPU of its own where there are any; else this process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        return ALONE
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) != size:
        raise UserError(
            f"{size} ranks on several machines: `upshot train` uses the GPUs of one machine; "
            "start it there with torchrun --nproc-per-node N"
        )
    _take_gpu(device, int(os.environ["LOCAL_RANK"]))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: whatever its name resolves to
    import torch
    import torch.distributed as collectives

    gpu = device != "cpu" and torch.cuda.is_available()
    collectives.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=COLLECTIVE)
    store = collectives.PrefixStore("upshot", collectives.distributed_c10d._get_default_store())
    ranks = ProcessGroup(store, collectives.get_rank(), size, collectives)
    gpus = ranks.all_gather_object("gpu", gpu)
    if any(gpus) and not all(gpus):
        raise UserError(f"{size} ranks, but {sum(gpus)} GPUs; start torchrun with --nproc-per-node {sum(gpus)}")
    return ranks


def _take_gpu(device: str, rank: int) -> None:
    """Let this process see one GPU, before anything has looked: every 'cuda' of it, in any thread, is then that one."""
    if device == "cpu":
        return
    if device.startswith("cuda:"):
        raise UserError(f"model.device is '{device}', but each rank takes a GPU of its own; leave it 'auto'")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    elif seen:
        gpu_of_rank = seen.split(",")[rank : rank + 1]
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_of_rank[0] if gpu_of_rank else ""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
