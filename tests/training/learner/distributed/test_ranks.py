"""Ranks in one process: how work is divided, exchanged and stopped, and the sharded optimizer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.workshop import adam_config, recipe
from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import BudgetExceeded, UserError
from upshot.models.client.budget import Budget
from upshot.models.connect import connect
from upshot.rewards.workers.pool import PoolManager
from upshot.rollout.reply import Rollout
from upshot.run import run as runs
from upshot.run.folder import RunFolder
from upshot.run.forecast import plan
from upshot.run.run import RunServices
from upshot.training.learner.distributed.pickling import dumps, loads
from upshot.training.learner.distributed.process_group import PIECE, ProcessGroup, RankLost, RankStopped, open_ranks
from upshot.training.learner.distributed.ranks import ALONE, Ranks, add_counts, assign, interleave, shares
from upshot.training.learner.optim.adamw import MasterAdamW
from upshot.training.learner.optim.zero import ShardedAdamW, merge_states, part_of_state

T = TypeVar("T")
SIZES = st.lists(st.integers(0, 50), max_size=30)


class ByStore:
    """torch.distributed's collectives, implemented with the store."""

    def __init__(self, ranks: Callable[[], ProcessGroup]) -> None:
        self.ranks = ranks

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self.ranks().all_gather_object("sum", tensor.clone())).sum(0))

    def reduce(self, tensor: torch.Tensor, dst: int) -> None:
        total = torch.stack(self.ranks().all_gather_object("sum", tensor.clone())).sum(0)
        tensor.copy_(total if self.ranks().rank == dst else torch.full_like(total, 1e9))

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        tensor.copy_(self.ranks().all_gather_object("spread", tensor.clone())[src])

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self.ranks().store.set(f"sent/{self.ranks().rank}/{self._count('sent')}", dumps(tensor.clone()))

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        tensor.copy_(loads(self.ranks().store.get(f"sent/{src}/{self._count(f'from {src}')}")))

    def _count(self, what: str) -> int:
        counts = self.__dict__.setdefault("counts", {})
        counts[what] = counts.get(what, 0) + 1
        return int(counts[what])


def on_ranks(size: int, work: Callable[[ProcessGroup], T]) -> list[T]:
    """Run a function on this many ranks, each in a thread."""
    store = torch.distributed.HashStore()

    def one(rank: int) -> T:
        found: list[ProcessGroup] = []
        found.append(ProcessGroup(store, rank, size, ByStore(lambda: found[0])))
        return work(found[0])

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


# Who does what


@given(st.integers(0, 40), st.integers(1, 9))
def test_every_row_is_played_by_one_rank_and_comes_back_in_its_place(count: int, size: int) -> None:
    ranks = []
    for rank in range(size):
        one = Ranks()
        one.rank, one.size = rank, size
        ranks.append(one)
    assert interleave([[*one.own(count)] for one in ranks]) == [*range(count)]


@given(SIZES, st.integers(1, 9))
def test_sequences_are_cut_into_runs_of_about_the_same_size(sizes: Sequence[int], ranks: int) -> None:
    cut = shares(sizes, ranks)
    assert len(cut) == ranks and [i for own in cut for i in own] == [*range(len(sizes))]
    fair = sum(sizes) / ranks
    assert all(sum(sizes[i] for i in own) <= fair + max(sizes, default=0) for own in cut)


@given(SIZES, st.integers(1, 9))
def test_parameters_are_assigned_evenly_to_ranks(sizes: Sequence[int], ranks: int) -> None:
    owners = assign(sizes, ranks)
    load = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(load) == sum(sizes) and max(load) - min(load) <= max(sizes, default=0)


def test_counters_of_ranks_add_up_to_the_total() -> None:
    before = {"user": {"calls": 10, "failed": {"timeout": 1}}}
    one = {"user": {"calls": 13, "failed": {"timeout": 1, "busy": 2}}}
    two = {"user": {"calls": 15, "failed": {"timeout": 2}}, "judge": {"calls": 4}}
    assert add_counts(before, [one, two]) == {
        "user": {"calls": 18, "failed": {"timeout": 2, "busy": 2}},
        "judge": {"calls": 4},
    }
    assert add_counts({}, [one]) == one


def test_a_manager_that_receives_the_total_continues_counting_from_it() -> None:
    pool = PoolManager()
    pool._workers = type("Busy", (), {"stats": {"items": 3, "timeouts": 1}})()  # type: ignore[assignment]
    pool.restore({"items": 10.0, "timeouts": 1.0})
    assert pool.state()["items"] == 10 and pool.state()["timeouts"] == 1


def test_limits_of_every_endpoint_are_shared_among_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including those of models that only a map of classmates names."""
    services = SimpleNamespace(
        models={
            "judge": connect({"url": "http://x/v1", "model": "m", "concurrency": 9, "requests_per_minute": 60}),
            "from the map": connect({"url": "http://y/v1", "model": "m", "concurrency": 6}),
        },
        budget=Budget(),
    )
    monkeypatch.setattr(runs, "build_services", lambda *_, **__: services)
    monkeypatch.setattr(runs, "ModelPool", lambda *_: None)
    monkeypatch.setattr(runs, "configure_helpers", lambda recipe, _: recipe)
    shared: list[Any] = []
    ranks = SimpleNamespace(size=2, share=shared.append)
    opened = RunServices(recipe(tmp_path), RunFolder(tmp_path), ranks)  # type: ignore[arg-type]

    async def until_started() -> None:
        async with opened.open(MagicMock(), None):
            raise AssertionError("nothing of it can start")

    with pytest.raises(AttributeError, match="restore"):  # all limits are shared by then
        asyncio.run(until_started())
    slots = {name: model.limits.slots.processes for name, model in services.models.items()}
    assert slots == {"judge": 2, "from the map": 2} and shared == [services.budget]
    assert services.models["judge"].limits._requests.rate == 0.5


def test_a_dry_run_shows_the_number_of_ranks_and_which_would_be_idle(tmp_path: Path) -> None:
    assert "ranks " not in plan(recipe(tmp_path))
    assert "2 processes, an engine each for up to 2 of a step's prompts" in plan(recipe(tmp_path), ranks=2)
    assert "1 of them play nothing" in plan(recipe(tmp_path), ranks=4)


def test_a_rank_other_than_the_first_writes_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, read_only=True)
    with folder.lock(print):
        folder.append_metrics("rl", 1, {"x": 1})
        folder.append_rollouts([{"x": 1}])
        folder.write_index()
        folder.write_status("running")
        folder.write_spent({"calls": 1})
        folder.write_recipe(recipe(tmp_path))
        folder.rewind(["rl"], "rl", 0)
        folder.write_samples(1, [])
        folder.write_notes("a note", ["a tag"])
        folder.drop_failed_start()
        folder.checkpoints.save("rl", 1, 1, lambda to: to.mkdir())
    assert not [*tmp_path.iterdir()]
    tried = {"append_metrics", "append_rollouts", "write_status", "write_spent", "write_recipe", "write_samples"}
    tried |= {"rewind", "drop_failed_start", "lock", "create", "write_notes", "write_index"}
    reads = {"open", "check_free", "begun", "recipe", "status", "metrics", "rollouts", "replies", "futures", "lines"}
    reads |= {"read_object", "samples", "spent", "started", "latest", "checkpoint", "steps", "evals", "best", "notes"}
    does = {name for name in vars(RunFolder) if not name.startswith("_")}
    assert does == tried | reads, "whatever else a run folder learns to do is tried here"


# What is handed over


def test_everything_sent_under_a_topic_reaches_all_in_order_even_if_large() -> None:
    def work(ranks: ProcessGroup) -> tuple[Any, Any, Any]:
        large = ranks.all_gather_object("large", bytes([ranks.rank]) * (PIECE + 10))
        again = ranks.all_gather_object("large", ranks.rank)
        return [(len(x), x[-1]) for x in large], again, ranks.broadcast_object("first", ranks.rank)

    assert on_ranks(3, work) == [([(PIECE + 10, rank) for rank in range(3)], [0, 1, 2], 0)] * 3


def test_exchanged_data_is_removed_from_the_store() -> None:
    def work(ranks: ProcessGroup) -> Any:
        before = ranks.store.num_keys()
        ranks.all_gather_object("x", "y")
        ranks.all_gather_object("end", None)
        return before, ranks

    found = on_ranks(2, work)
    assert found[0][1].store.num_keys() <= 1, "but for what was cleared last"


def test_a_reply_is_sent_without_its_connections_but_with_its_counters() -> None:
    conversation = Conversation(Row("a", (Message("user", "hi"),)), seed=3, key="a#1")
    conversation.session = {"metrics": {"turns": 2}, "connection": threading.Lock()}
    conversation.ended = "done"
    there = loads(dumps([Rollout(conversation, group=2)]))[0]
    assert (there.group, there.conversation.key, there.conversation.ended) == (2, "a#1", "done")
    assert there.conversation.session == {"metrics": {"turns": 2}}
    assert there.conversation.rng.random() == conversation.rng.random()


def test_objects_that_cannot_be_sent_are_named() -> None:
    conversation = Conversation(Row("a", (), goal=threading.Lock()))
    with pytest.raises(UserError, match=r"cannot be sent to the other ranks: .*lock.*plain data"):
        dumps([Rollout(conversation)])


def test_ranks_never_spend_more_calls_than_their_budget() -> None:
    def work(ranks: ProcessGroup) -> int:
        budget = Budget(max_calls=50)
        budget.restore({"calls": 10, "tokens": 3, "dollars": 0.5})
        ranks.share(budget)
        made = 0
        try:
            while True:
                budget.take_call()
                budget.charge(2, 0.25)
                made += 1
        except BudgetExceeded:
            ranks.all_gather_object("end", None)
            assert budget.state() == {"calls": 50, "tokens": 3 + 2 * 40, "dollars": 0.5 + 0.25 * 40}
            return made

    assert sum(on_ranks(3, work)) == 40


# When to stop


def test_a_request_to_stop_takes_effect_before_the_same_update_on_all_ranks() -> None:
    def work(ranks: ProcessGroup) -> tuple[int, int, bool]:
        done = 0
        try:
            while True:
                if ranks.rank == 1 and done == 3:
                    ranks.request_stop(signal.SIGTERM)
                with ranks.update():
                    ranks.all_gather_object("learn", done)
                done += 1
        except RankStopped as why:
            return done, why.signal, ranks.stop(str(why), whole=True)

    found = on_ranks(3, work)
    assert len(set(found)) == 1 and found[0][0] in (3, 4) and found[0][1:] == (signal.SIGTERM, True)


def test_a_rank_that_fails_between_updates_stops_the_waiting_others_with_its_reason() -> None:
    def work(ranks: ProcessGroup) -> tuple[bool, str]:
        with ranks.update():
            pass
        if ranks.rank == 1:
            return ranks.stop("no money", whole=True), ranks.reason
        with pytest.raises(RankStopped, match="rank 1: no money") as why:
            ranks.all_gather_object("play", None)
        return ranks.stop(str(why.value), whole=ranks.rank != 2), ranks.reason

    assert on_ranks(3, work) == [(False, "rank 1: no money"), (False, "no money"), (False, "rank 1: no money")]
    assert on_ranks(2, work) == [(True, "rank 1: no money"), (True, "no money")], "all have something whole to save"


def test_a_rank_that_fails_inside_an_update_has_nothing_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upshot.training.learner.distributed.process_group.GONE_SECONDS", 0.01)

    def work(ranks: ProcessGroup) -> bool:
        with pytest.raises(ZeroDivisionError), ranks.update():
            raise ZeroDivisionError
        return ranks.stop("broken", whole=True)

    assert on_ranks(2, work) == [False, False]


def test_a_rank_that_waits_for_a_dead_one_names_it() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    def work(ranks: ProcessGroup) -> None:
        if ranks.rank == 1:
            return
        ranks._pids[1] = gone.pid
        with pytest.raises(RankLost, match=rf"rank 1 \(process {gone.pid}\) has ended"):
            ranks.all_gather_object("play", None)
        assert not ranks.stop("lost", whole=True) and "has ended" in ranks.reason

    on_ranks(2, work)


# The optimizer


def noise(seed: int) -> list[torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=stream) for shape in [(4, 3), (5,), (2, 2), (3,), (6, 2)]]


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(tensor.to(dtype)) for tensor in noise(0)]


def adam(some: Sequence[torch.nn.Parameter]) -> MasterAdamW:
    return MasterAdamW(some, 0.01, adam_config(0.1))


def gradients(step: int, chunk: int) -> list[torch.Tensor | None]:
    """Gradients of one micro-batch; the fourth parameter never has any, the second only in one."""
    found: list[torch.Tensor | None] = [*noise(100 * step + chunk + 1)]
    found[3] = None
    if chunk:
        found[1] = None
    return found


def trained(
    optimizer: MasterAdamW | ShardedAdamW, own: Sequence[torch.nn.Parameter], chunks: Sequence[int | None]
) -> list[float]:
    norms = []
    for step in range(2):
        for chunk in chunks:
            for p, grad in zip(own, gradients(step, chunk) if chunk is not None else [None] * 5, strict=True):
                if grad is not None:
                    p.grad = grad.to(p.dtype) if p.grad is None else p.grad + grad.to(p.dtype)
            optimizer.gather()
        norms.append(optimizer.clip(0.5))
        optimizer.step(0.01)
        optimizer.zero_grad()
    return norms


def test_moments_of_8_bits_are_sharded_too() -> None:
    def small(some: Sequence[torch.nn.Parameter]) -> MasterAdamW:
        return MasterAdamW(some, 0.01, adam_config(0.1, small=True))

    own = parameters(torch.bfloat16)
    alone = small(own)
    trained(alone, own, [0, 1, 2])

    def work(ranks: ProcessGroup) -> Any:
        mine = parameters(torch.bfloat16)
        optimizer = ShardedAdamW(mine, ranks, small)
        trained(optimizer, mine, [0, 2] if ranks.rank == 0 else [1, None])
        state = optimizer.state_dict()
        optimizer.load_state_dict(ranks.broadcast_object("whole", state))
        return mine, state

    (mine, state), _ = on_ranks(2, work)
    assert all(torch.allclose(p, q, atol=1e-2) for p, q in zip(mine, own, strict=True))
    expected = alone.state_dict()
    assert state["adam"].keys() == expected["adam"].keys()
    for place, other in expected["adam"].items():
        assert state["adam"][place]["step"] == other["step"] == 2
        for scale in ("mean_scale", "root_scale"):
            assert torch.allclose(state["adam"][place][scale], other[scale], rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sharded_optimizer_steps_clips_and_saves_as_one_does(dtype: torch.dtype) -> None:
    own = parameters(dtype)
    alone = adam(own)
    norms = trained(alone, own, [0, 1, 2])

    def work(ranks: ProcessGroup) -> Any:
        mine = parameters(dtype)
        optimizer = ShardedAdamW(mine, ranks, adam)
        found = trained(optimizer, mine, [0, 2] if ranks.rank == 0 else [1, None])
        return found, mine, optimizer.state_dict(), sum(m.numel() for m in optimizer.masters)

    ranks = on_ranks(2, work)
    assert sum(share for *_, share in ranks) == sum(p.numel() for p in own), "each parameter has one owner"
    for found, mine, _, _ in ranks:
        assert found == pytest.approx(norms, rel=1e-6) and min(norms) > 0.5
        assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(mine, own, strict=True))
        assert all(torch.equal(p, q) for p, q in zip(mine, ranks[0][1], strict=True)), "all ranks have the same"
    saved, expected = ranks[0][2], alone.state_dict()
    assert saved["shapes"] == expected["shapes"] and saved["masters"].keys() == expected["masters"].keys()
    assert saved["adam"].keys() == expected["adam"].keys(), "none for what never had a gradient"
    for place, state in expected["adam"].items():
        assert all(torch.allclose(saved["adam"][place][key], value, atol=1e-6) for key, value in state.items())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 4))
def test_a_state_saved_by_any_number_of_ranks_loads_on_any_other_number(
    sizes: list[int], before: int, after: int
) -> None:
    state = {
        "shapes": {place: (size,) for place, size in enumerate(sizes)},
        "masters": {place: f"master {place}" for place in range(0, len(sizes), 2)},
    }
    for ranks in (before, after):
        owners = assign(sizes, ranks)
        shares = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]
        parts = [part_of_state(state, places) for places in shares]
        for places, part in zip(shares, parts, strict=True):
            assert part["masters"] == {i: f"master {p}" for i, p in enumerate(places) if p % 2 == 0}
        assert merge_states([p if owners.count(r) else {} for r, p in enumerate(parts)], owners) == state


# How they are found


def test_a_process_that_torchrun_did_not_start_is_alone() -> None:
    assert open_ranks() is ALONE


@pytest.mark.parametrize(
    ("more", "device", "words"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, "auto", "4 ranks on several machines"),
        ({"LOCAL_WORLD_SIZE": "4"}, "cuda:1", "model.device is 'cuda:1', but each rank takes a GPU of its own"),
    ],
)
def test_settings_that_exclude_several_ranks_are_refused(
    more: dict[str, str], device: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", **more}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        open_ranks(device)


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("4,7", "7"), ("4", ""), ("", "")])
def test_a_rank_sees_only_the_gpu_of_its_number(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from upshot.training.learner.distributed.process_group import _take_gpu

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    _take_gpu("auto", 1)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == after
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before or "")
