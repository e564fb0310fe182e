"""Five models in one process under a plan that holds three: swaps, tokens, bandwidth, and a whole step.

    python benchmarks/pool.py --json pool.json    # GPU: 135M, 360M, 1.1B, 3B and 8B shapes in bfloat16, random weights
    python benchmarks/pool.py --tiny              # CPU: the same lines, tiny shapes

1. What each model answers alone, to greedy and seeded requests.
2. Random swaps, each followed by the same requests: tokens compared with those of each model alone, peak memory with
   the plan, bytes per second with a plain copy from page-locked host memory in the same run. Every fourth time,
   requests are interrupted half-way: their tokens are compared with those of a model alone that then recomputes all.
3. A step like CollabLLM's (policy ⇄ user, then judge and classmates) compared with the sum of the times that each model
   takes for the same requests alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.sequence import Rules, Sequence
from upshot.serving.swap import memory
from upshot.serving.swap.layout import MemoryLayout, lay_out, round_up
from upshot.serving.swap.memory import PIECE
from upshot.serving.swap.pool import ModelPool
from upshot.training.learner.memory.plan import step_bytes
from upshot.training.learner.memory.shape import ModelShape

SHAPES: dict[str, dict[str, int]] = {
    "135m": {"layers": 30, "hidden": 576, "heads": 9, "kv": 3, "mlp": 1536, "vocab": 49152, "tied": 1},
    "360m": {"layers": 32, "hidden": 960, "heads": 15, "kv": 5, "mlp": 2560, "vocab": 49152, "tied": 1},
    "1.1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv": 8, "mlp": 8192, "vocab": 49152, "tied": 1},
    "3b": {"layers": 28, "hidden": 3072, "heads": 24, "kv": 8, "mlp": 8192, "vocab": 128256, "tied": 1},
    "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv": 8, "mlp": 14336, "vocab": 128256, "tied": 0},
}
TINY: dict[str, dict[str, int]] = {
    name: {**SHAPES[name], "layers": 2, "hidden": hidden, "heads": 4, "kv": 2, "mlp": 2 * hidden, "vocab": 300}
    for name, hidden in zip(SHAPES, (16, 32, 64, 96, 128), strict=True)
}
POLICY, USER, JUDGE, CLASSMATES = "1.1b", "3b", "8b", ("135m", "360m")
GIB = 2**30


def build(shape: dict[str, int], seed: int, device: torch.device) -> LlamaForCausalLM:
    """A Llama of the shape with random weights, made on the device in its dtype."""
    config = LlamaConfig(
        vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["kv"],
        max_position_embeddings=4096, tie_word_embeddings=bool(shape["tied"]), initializer_range=0.04,
    )  # fmt: skip
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def requests(engine: Engine, count: int, prompt: int, new: int) -> list[Sequence]:
    """The same requests every time: every other one greedy. Few enough ids that none begins before all are there."""
    rng = random.Random(7)
    ids = [[rng.randrange(3, engine.shape.vocab) for _ in range(prompt)] for _ in range(count)]
    return [
        engine.submit(prompt, Rules(max_tokens=new, seed=i, temperature=float(i % 2)))[0]
        for i, prompt in enumerate(ids)
    ]


def said(engine: Engine, args: argparse.Namespace) -> list[list[int]]:
    """The ids that an engine samples for them."""
    engine.pool.forget()  # with a cached prefix less is read at once, which rounds differently
    asked = requests(engine, args.prompts, args.prompt, args.new)
    engine.run_until_done()
    return [seq.sampled for seq in asked]


def half_done(engine: Engine, args: argparse.Namespace) -> list[Sequence]:
    """The same requests, interrupted half-way."""
    engine.pool.forget()
    asked = requests(engine, args.prompts, args.prompt, args.new)
    for _ in range(args.new // 2):
        engine.step()
    return asked


def interrupted(engine: Engine, args: argparse.Namespace) -> list[list[int]]:
    """The ids when everything is computed again in the middle, which rounds differently."""
    asked = half_done(engine, args)
    engine.weights_changed()
    engine.run_until_done()
    return [seq.sampled for seq in asked]


class Bench:
    """The models, the pool and what was measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
        self.on_gpu = self.device.type == "cuda"
        self.shapes = SHAPES if self.on_gpu else TINY
        self.found: dict[str, Any] = {"device": torch.cuda.get_device_name() if self.on_gpu else "cpu"}
        self.engines: dict[str, Engine] = {}
        self.alone: dict[str, list[list[int]]] = {}
        self.broken: dict[str, list[list[int]]] = {}
        self.lock_s = 0.0

    def sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    # --- before the pool

    def rate(self) -> float:
        """Bytes a second of one plain copy from locked host memory."""
        size = (2 << 30) if self.on_gpu else 1 << 22
        source = torch.empty(size, dtype=torch.uint8)
        if self.on_gpu:
            memory.lock_pages(source)
        target = torch.empty(size, dtype=torch.uint8, device=self.device)
        times = []
        for _ in range(5):
            self.sync()
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            self.sync()
            times.append(time.perf_counter() - started)
        if self.on_gpu:
            memory.unlock_pages(source)
        return size / min(times)

    def plan(self) -> MemoryLayout:
        """Places in as much memory as the largest, and the middle one or the two smallest, take: three at once."""
        size = 2 if self.on_gpu else 4
        sizes, self.steps = {}, {}
        for name, shape in self.shapes.items():
            own = ModelShape(LlamaConfig(
                hidden_size=shape["hidden"], num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"],
                num_key_value_heads=shape["kv"], intermediate_size=shape["mlp"], vocab_size=shape["vocab"],
                tie_word_embeddings=bool(shape["tied"]),
            ))  # fmt: skip
            weights = own.parameters * size + memory.GROUP * (8 * own.layers + 4)
            sizes[name] = round_up(weights) + round_up(self.args.tokens * own.kv_numbers * size)
            self.steps[name] = sum(step_bytes(own, size))
        order = sorted(sizes.values())
        layout = lay_out(sizes, order[-1] + max(order[2], order[0] + order[1]))
        assert layout is not None
        apart = [set(pair) for pair in layout.conflicts]
        groups = [set(some) for n in range(1, 6) for some in combinations(sizes, n)]
        most = max(len(some) for some in groups if not any(pair <= some for pair in apart))
        self.found |= {"arena_gib": layout.size / GIB, "models_gib": sum(sizes.values()) / GIB, "holds": most}
        self.found["places"] = {r.name: [r.start / GIB, r.stop / GIB] for r in layout.regions}
        print(f"arena {layout.size / GIB:.2f} GiB of {sum(sizes.values()) / GIB:.2f}, holds {most} of {len(sizes)}")
        for region in layout.regions:
            print(
                f"  {region.name:5} {region.start / GIB:7.2f} to {region.stop / GIB:7.2f} GiB, never with "
                f"{', '.join(layout.rivals(region.name)) or '-'}"
            )
        return layout

    def make(self, layout: MemoryLayout) -> None:
        """Each model alone first, then moved into the pool."""
        self.pool = ModelPool(layout, self.device, piece=PIECE if self.on_gpu else 4096)
        lock = memory.lock_pages

        def timed(memory: torch.Tensor) -> bool:
            started = time.perf_counter()
            done = lock(memory)
            self.lock_s += time.perf_counter() - started
            return done

        memory.lock_pages = timed
        for seed, (name, shape) in enumerate(self.shapes.items()):
            started = time.perf_counter()
            module = build(shape, seed, self.device)
            seat = self.pool.slots[name]
            settings = {"own_stream": True, "max_running": self.args.conversations}
            kv = seat.region.size - round_up(memory.spans(module)[-1].stop)
            engine = Engine(module, set(), EngineSettings(kv_bytes=kv, **settings))
            self.alone[name] = said(engine, self.args)
            self.broken[name] = interrupted(engine, self.args)
            repeats = said(engine, self.args) == self.alone[name]
            made = time.perf_counter()
            engine.park()
            del engine
            gc.collect()
            seat.furnish(module)
            moved = time.perf_counter()
            seat.engine = Engine(module, set(), EngineSettings(kv_bytes=seat.kv_bytes, **settings), seat)
            self.engines[name] = seat.engine
            same = said(seat.engine, self.args) == self.alone[name]
            print(
                f"  {name:5} {seat.weights.size / GIB:6.2f} GiB: made and alone {made - started:5.1f} s, "
                f"to locked host memory {moved - made:5.1f} s, in the pool {time.perf_counter() - moved:5.1f} s, "
                f"tokens {'equal' if same else 'DIFFER'}{'' if repeats else ' (alone it does not repeat itself)'}",
                flush=True,
            )
            self.found.setdefault("equal_at_start", {})[name] = same
            del module
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()
        memory.lock_pages = lock
        self.found["locking_s"] = self.lock_s
        self.pool.take_times()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    # --- swaps

    def swaps(self, rate: float) -> None:
        """Random models come in, say what they said alone, and leave; sometimes in the middle of it."""
        rng = random.Random(1)
        seats = self.pool.slots
        whole, loads, sizes, wrong, halves, broken = [], [], [], 0, 0, 0
        half: dict[str, list[Sequence]] = {}
        started = time.perf_counter()
        for number in range(self.args.swaps):
            away = [name for name, seat in seats.items() if not seat.here]
            name = rng.choice(away)
            engine, seat = self.engines[name], seats[name]
            self.sync()
            began = time.perf_counter()
            seat.enter()
            self.sync()
            whole.append(time.perf_counter() - began)
            loads.append(self.pool.swap_s - sum(loads))
            sizes.append(seat.weights.size)
            if name in half:  # what was interrupted is finished now, from the ids it had
                engine.run_until_done()
                own = [seq.sampled for seq in half.pop(name)]
                assert all(len(ids) == self.args.new for ids in own), "a request was lost"
                halves += 1
                broken += own != self.broken[name]
            wrong += said(engine, self.args) != self.alone[name]
            if number % 4 == 3:
                half[name] = half_done(engine, self.args)
        for name, seqs in half.items():
            self.engines[name].run_until_done()
            assert all(len(seq.sampled) == self.args.new for seq in seqs), "a request was lost"
        loaded, entered = sum(sizes) / sum(loads), sum(sizes) / sum(whole)
        self.found["swaps"] = {
            "count": self.args.swaps, "seconds": time.perf_counter() - started, "gib": sum(sizes) / GIB,
            "sets_of_tokens_that_differ": wrong, "left_half_done": halves,
            "of_those_differ": broken, "host_to_device_gb_s": rate / 1e9,
            "load_gb_s": loaded / 1e9, "whole_swap_gb_s": entered / 1e9, "load_share": loaded / rate,
            "whole_swap_share": entered / rate, "whole_swap_ms_median": 1000 * statistics.median(whole),
        }  # fmt: skip
        self.memory()

    def memory(self) -> None:
        """The peak against the plan: the arena, each model's captured steps, and one step of each."""
        planned = self.pool.arena.layout.size + sum(self.steps.values())
        peak = torch.cuda.max_memory_allocated() if self.on_gpu else self.pool.arena.most
        self.found["memory"] = {
            "planned_gib": planned / GIB, "peak_gib": peak / GIB, "share": peak / planned,
            "arena_most_gib": self.pool.arena.most / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB if self.on_gpu else None,
        }  # fmt: skip

    # --- a whole step

    async def reply(self, name: str, ids: list[int], new: int, seed: int) -> None:
        """One request to a model."""
        engine = self.engines[name]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ids = [i % (engine.shape.vocab - 3) + 3 for i in ids]
        engine.submit(ids, Rules(max_tokens=new, seed=seed), on_done=lambda _: done.set_result(None))
        engine.wake()
        await done

    async def conversation(self, number: int, who: set[str]) -> None:
        """Policy and user in turn, then the judge and each classmate; of those in `who` only."""
        new, rng = self.args.reply, random.Random(number)
        said = [rng.randrange(1 << 16) for _ in range(self.args.opening)]
        for turn in range(2 * self.args.rounds + 1):
            name = USER if turn % 2 else POLICY
            if name in who:
                await self.reply(name, said, new, number)
            said = said + [rng.randrange(1 << 16) for _ in range(new)]
        last = [(JUDGE, said, new // 2), *((name, said[: -new // 2], new) for name in CLASSMATES)]
        await asyncio.gather(*(self.reply(name, ids, n, number) for name, ids, n in last if name in who))

    def step(self, who: set[str]) -> float:
        """Seconds that a step takes."""

        async def play() -> None:
            await asyncio.gather(*(self.conversation(i, who) for i in range(self.args.conversations)))
            await self.pool.aclose()

        for engine in self.engines.values():
            engine.pool.forget()  # nothing of an earlier step is useful in the next
        self.sync()
        started = time.perf_counter()
        asyncio.run(play())
        self.sync()
        return time.perf_counter() - started

    def whole(self) -> None:
        """A step of all against the sum of each one's own; the second time, when every step is captured."""
        alone = {}
        for name in self.shapes:
            self.pool.slots[name].enter()
            self.step({name})
            alone[name] = self.step({name})
        everybody = set(self.shapes)
        self.step(everybody)
        self.pool.take_times()
        times = [self.step(everybody) for _ in range(self.args.rounds_of_steps)]
        spent = self.pool.take_times()
        step, total = statistics.median(times), sum(alone.values())
        self.found["step"] = {
            "seconds": step, "all": times, "alone": alone, "sum": total, "ratio": step / total,
            "swaps": spent["time/pool/swaps"] / len(times), "swap_s": spent["time/pool/swap_s"] / len(times),
            "waiting_s": spent["time/pool/waiting_s"] / len(times), "conversations": self.args.conversations,
        }  # fmt: skip

    def table(self) -> str:
        """The results, compared with the goals."""
        swaps, memory, step = self.found["swaps"], self.found["memory"], self.found["step"]
        half = f"; of {swaps['left_half_done']} left half done {swaps['of_those_differ']}"
        rows = [
            ("random swaps", f"{swaps['count']}, {swaps['gib']:.1f} GiB, {swaps['seconds']:.1f} s", "200, none fails"),
            ("sets of tokens that differ", f"{swaps['sets_of_tokens_that_differ']}{half}", "0"),
            ("peak of the plan", f"{memory['peak_gib']:.2f} of {memory['planned_gib']:.2f} GiB", "at most 1"),
            ("host to device, plain", f"{swaps['host_to_device_gb_s']:.1f} GB/s", ""),
            ("load", f"{swaps['load_gb_s']:.1f} GB/s = {swaps['load_share']:.0%}", "70 %"),
            ("whole swap", f"{swaps['whole_swap_gb_s']:.1f} GB/s = {swaps['whole_swap_share']:.0%}", "70 %"),
            (
                "step of all",
                f"{step['seconds']:.2f} s / {step['sum']:.2f} s = {step['ratio']:.2f}, {step['swaps']:.0f} swaps "
                f"({step['swap_s']:.2f} s)",
                "at most 1.3",
            ),
            ("alone", ", ".join(f"{name} {took:.2f} s" for name, took in step["alone"].items()), ""),
            ("locking host memory", f"{self.found['locking_s']:.1f} s", ""),
        ]
        return "\n".join(f"{name:27} {value:60} {goal}" for name, value, goal in [("", "measured", "goal"), *rows])

    def run(self) -> None:
        """All of it."""
        started = time.perf_counter()
        rate = self.rate()
        self.make(self.plan())
        print(f"made in {time.perf_counter() - started:.1f} s", flush=True)
        self.swaps(rate)
        print(json.dumps(self.found["swaps"]), flush=True)
        self.whole()
        self.memory()
        self.found["seconds"] = time.perf_counter() - started
        print(self.table(), flush=True)


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=0, help="whose keys and values each model has room for")
    parser.add_argument("--prompts", type=int, default=8, help="requests after each swap")
    parser.add_argument("--prompt", type=int, default=0, help="their ids")
    parser.add_argument("--new", type=int, default=8, help="ids sampled for each")
    parser.add_argument("--conversations", type=int, default=0, help="of a step")
    parser.add_argument("--opening", type=int, default=0, help="ids that a conversation begins with")
    parser.add_argument("--reply", type=int, default=0, help="ids of a reply")
    parser.add_argument("--rounds", type=int, default=2, help="user turns of a conversation")
    parser.add_argument("--rounds-of-steps", type=int, default=2, help="steps that are measured")
    parser.add_argument("--json", metavar="FILE", default="")
    args = parser.parse_args()
    small = args.tiny or not torch.cuda.is_available()
    sizes = {"tokens": (1024, 65536), "prompt": (12, 128), "conversations": (6, 64), "opening": (16, 256)}
    for name, (tiny, large) in {**sizes, "reply": (8, 128)}.items():
        setattr(args, name, getattr(args, name) or (tiny if small else large))
    bench = Bench(args)
    bench.run()
    if args.json:
        Path(args.json).write_text(json.dumps(bench.found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
