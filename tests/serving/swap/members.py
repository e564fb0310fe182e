"""Five tiny models, what each of them generates alone, and a pool with room for three of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.sequence import Rules, Sequence
from upshot.serving.swap.layout import MemoryLayout, lay_out, round_up
from upshot.serving.swap.memory import spans
from upshot.serving.swap.pool import ModelPool

torch.set_num_threads(1)
KV = 1 << 18
NAMES = [f"m{size}" for size in range(5)]


def make(name: str, **over: Any) -> LlamaForCausalLM:
    """A model of random weights; each has a different size."""
    number = int(name[1:])
    torch.manual_seed(number)
    hidden = 16 + 16 * number
    config = LlamaConfig(
        vocab_size=99, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, eos_token_id=None, **over,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@cache
def size(name: str) -> int:
    return round_up(spans(make(name))[-1].stop) + KV


def sizes(names: list[str]) -> dict[str, int]:
    return {name: size(name) for name in names}


def layout(names: list[str] = NAMES, holds: int = 3) -> MemoryLayout:
    """Places in as much memory as the largest of this many models need."""
    found = lay_out(sizes(names), sum(sorted(sizes(names).values())[-holds:]))
    assert found is not None
    return found


def engine_in(
    pool: ModelPool, name: str, settings: Callable[..., EngineSettings] = EngineSettings, **over: Any
) -> Engine:
    """The engine of one model in the pool."""
    slot = pool.slots[name]
    module = make(name, **over)
    slot.furnish(module)
    slot.engine = Engine(module, set(), settings(kv_bytes=slot.kv_bytes), slot)
    return slot.engine


def ask(engine: Engine, seed: int, count: int = 4, **more: Any) -> list[Sequence]:
    """Requests of several lengths, greedy and sampled."""
    rng = random.Random(seed)
    asked = []
    for number in range(count):
        ids = [rng.randrange(3, 99) for _ in range(rng.randint(2, 40))]
        rules = Rules(max_tokens=rng.randint(1, 12), seed=number, temperature=float(number % 2))
        asked += engine.submit(ids, rules, n=1 + number % 2, **more)
    return asked


@cache
def engine_of(name: str) -> Engine:
    """A model that does not share its device."""
    return Engine(make(name), set(), EngineSettings(kv_bytes=KV))


def alone(name: str, seed: int, count: int = 4) -> list[list[int]]:
    """What a model generates for the same requests without sharing its device."""
    engine = engine_of(name)
    engine.pool.forget()
    asked = ask(engine, seed, count)
    engine.run_until_done()
    return [seq.ids for seq in asked]
