"""Thousands of requests of mixed lengths with aborts, forks and weight updates: no leak, no influence between requests.

`UPSHOT_STRESS=10000` is the full run. Every sampled id is compared with the model's own forward on the weights that
sampled it, so every greedy output is what the request would have got alone.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable

import torch
from transformers import LlamaForCausalLM

from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.sequence import DONE, Rules, Sequence

REQUESTS = int(os.environ.get("UPSHOT_STRESS", "500"))
SLOTS = 24
OBJECTS_BOUND = 300
BYTES_BOUND = 1 << 12
"""Bytes of tensors: less than one page of keys and values."""


def holdings() -> tuple[int, int]:
    """Objects and bytes of tensors that this process holds, without what the allocator keeps in reserve."""
    gc.collect()
    found = gc.get_objects()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found if type(t) is torch.Tensor}
    return len(found), sum(storages.values())


def contents(engine: Engine) -> dict[str, int]:
    """The sizes of all containers of the scheduler and the pool."""
    scheduler, pool = engine.scheduler, engine.pool
    return {
        "waiting": len(scheduler.waiting),
        "running": len(scheduler.running),
        "reading": len(scheduler._reading),
        "copies": len(scheduler._copies),
        "rows": len(scheduler._rows),
        "slots taken": SLOTS - len(scheduler._slots),
        "pages held": pool.held,
        "prefixes beyond the pages": max(0, len(pool._found) - pool.n_pages),
        "keys without a prefix": sum(key is not None for key in pool._key) - len(pool._found),
        "entries beyond the pages": max(0, len(pool._idle) - 2 * pool.n_pages),
        "pages given back": len(pool._returned),
    }


class Soak:
    """Random requests and everything that can happen to them."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        page = 2 * 2 * 2 * 16 * 4 * 4
        sizes = EngineSettings(page_size=4, kv_bytes=160 * page, max_running=SLOTS, chunk_tokens=64)
        self.engine = Engine(model, eos_ids=set(), settings=sizes)
        self.weights = [w.detach().clone() for w in model.parameters()]
        self.rng = random.Random(0)
        self.noise = torch.Generator().manual_seed(0)
        self.bases = [[self.rng.randrange(3, 259) for _ in range(self.rng.randrange(8, 40))] for _ in range(6)]
        self.live: list[Sequence] = []
        self.unchecked: list[tuple[Sequence, int]] = []
        self.since: dict[Sequence, int] = {}
        """The index of the first unchecked id of each live sequence."""
        self.counts = dict.fromkeys(("requests", "aborts", "forks", "updates", "restarts", "ids"), 0)

    def play(self, requests: int) -> None:
        """Submit this many requests and run them all to their end."""
        goal = self.counts["requests"] + requests
        while self.counts["requests"] < goal or self.engine.scheduler.busy:
            if self.counts["requests"] < goal and len(self.live) < 60:
                self.submit()
            self.engine.step()
            self.disturb()
            for seq in [s for s in self.live if s.state == DONE]:
                self.live.remove(seq)
                self.unchecked.append((seq, self.since.pop(seq)))
            if len(self.unchecked) >= 64:
                self.check()
        self.check()
        assert not self.live and not self.since

    def submit(self) -> None:
        """One or three continuations of a prompt that shares its beginning with others."""
        rng = self.rng
        base = rng.choice(self.bases)
        prompt = base[: rng.randrange(1, len(base) + 1)] + [rng.randrange(3, 259) for _ in range(rng.randrange(6))]
        rules = Rules(max_tokens=rng.randrange(1, 20), temperature=0)
        self.watch(self.engine.submit(prompt, rules, n=rng.choice([1, 1, 1, 3])))

    def watch(self, seqs: list[Sequence]) -> None:
        """Follow new sequences."""
        self.counts["requests"] += len(seqs)
        self.live += seqs
        self.since |= {seq: seq.prompt_len for seq in seqs}

    def disturb(self) -> None:
        """Occasionally: an abort, a fork, new weights, or the same weights declared new."""
        rng = self.rng
        if self.live and rng.random() < 0.05:
            seq = rng.choice(self.live)
            self.counts["aborts"] += seq.state != DONE
            self.engine.abort(seq)
        if self.live and rng.random() < 0.05:
            seq = rng.choice(self.live)
            if seq.state != DONE:
                self.counts["forks"] += 1
                self.watch([self.engine.fork(seq, Rules(max_tokens=5, temperature=0))])
        if rng.random() < 0.01:
            self.update()
        elif rng.random() < 0.02:
            self.counts["restarts"] += 1
            self.engine.weights_changed()

    def update(self) -> None:
        """Change the weights while requests run; the ids sampled so far are checked on the old ones first."""
        self.unchecked += [(seq, self.since[seq]) for seq in self.live]
        self.check()
        self.since = {seq: len(seq.ids) for seq in self.live}
        with torch.no_grad():
            for weight, first in zip(self.model.parameters(), self.weights, strict=True):
                weight.copy_(first).add_(torch.randn(first.shape, generator=self.noise), alpha=0.02)
        self.engine.weights_changed()
        self.counts["updates"] += 1

    def check(self) -> None:
        """Every sampled id is the likeliest by the model's own forward, up to rounding."""
        work, self.unchecked = [(s, start) for s, start in self.unchecked if len(s.ids) > start], []
        if not work:
            return
        longest = max(len(s.ids) for s, _ in work)
        ids = torch.tensor([s.ids + [0] * (longest - len(s.ids)) for s, _ in work])
        with torch.no_grad():
            logits = self.model(input_ids=ids).logits
        behind = (logits.amax(-1)[:, :-1] - logits[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]).tolist()
        for (seq, start), row in zip(work, behind, strict=True):
            self.counts["ids"] += len(seq.ids) - start
            assert max(row[start - 1 : len(seq.ids) - 1]) < 1e-4, f"a wrong id in {seq.ids[start:]} after {start} ids"


def test_thousands_of_requests_leak_nothing_and_do_not_influence_each_other(
    make_llama: Callable[..., LlamaForCausalLM], capsys: object
) -> None:
    soak = Soak(make_llama())
    soak.play(REQUESTS // 4)
    objects, bytes_ = holdings()
    soak.play(REQUESTS - REQUESTS // 4)
    more, grown = (now - before for now, before in zip(holdings(), (objects, bytes_), strict=True))
    with capsys.disabled():  # type: ignore[attr-defined]
        print(f"\n{soak.counts}, grown by {grown} bytes of tensors and {more} objects")
    assert not any(contents(soak.engine).values()), contents(soak.engine)
    assert grown < BYTES_BOUND and more < OBJECTS_BOUND
    assert all(soak.counts.values())
