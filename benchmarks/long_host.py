"""What long conversations cost the host: rendering, ids, pages, spans and packing; no GPU, no model.

    python benchmarks/long_host.py                                   # 64 conversations of 65,536 tokens and 200 turns
    python benchmarks/long_host.py --conversations 4 --tokens 4096 16384 --turns 50

Each line is the CPU time of one thread for all conversations, and its growth from the shorter to the longer ones
relative to the number of tokens: 1.0 means linear.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from upshot.core.conversation import Conversation, Message, Row, Sample
from upshot.engine.pages import PagePool
from upshot.models.rendering import Renderer
from upshot.models.tiny import tiny_tokenizer
from upshot.training.learner.batch import shared_tokens, tree, worth_sharing
from upshot.training.learner.forward.attention import PackedAttention

WORDS = [f"w{number}" for number in range(500)]
Parts = dict[str, float]


class Clock:
    """CPU seconds by the name of a part."""

    def __init__(self) -> None:
        self.parts: Parts = {}

    def run(self, name: str, work: Callable[..., Any], *how: Any) -> Any:
        """The result of some work, whose time is added to a part's."""
        began = time.thread_time()
        result = work(*how)
        self.parts[name] = self.parts.get(name, 0.0) + time.thread_time() - began
        return result


def converse(renderer: Renderer, tokens: int, turns: int, seed: int, clock: Clock) -> Conversation:
    """A conversation as a rollout makes it: `turns` turns of the policy, half of the tokens are the user's."""
    rng, each = random.Random(seed), max(tokens // turns // 2 - 4, 1)
    words = [" ".join(rng.choices(WORDS, k=each)) for _ in range(turns)]
    conversation = Conversation(Row(str(seed), (Message("user", words[0]),)), seed)
    reply = renderer.encode_words(words[0])[:each]
    for said in words:
        context = clock.run("render what is new", renderer.context, conversation)
        prompt = clock.run("ids of the prompt", lambda now=conversation, new=context: now.ids + new)
        assert prompt
        sample = Sample(tuple(context), tuple(reply), (0.0,) * len(reply), "stop")
        clock.run("say", conversation.say, Message("assistant", said), sample)
        clock.run("say", conversation.say, Message("user", said))
    return conversation


def measure(conversations: int, tokens: int, turns: int, futures: int) -> Parts:
    """All parts, for all conversations."""
    renderer, clock, data = Renderer(tiny_tokenizer(WORDS)), Clock(), []
    for seed in range(conversations):
        conversation = converse(renderer, tokens, turns, seed, clock)
        ids, mask = clock.run("ids, mask and log-probabilities", lambda c=conversation: (c.ids, (c.mask, c.logprobs)))
        assert len(mask[0]) == len(ids)
        data.append(ids)
    pool = PagePool(conversations * (tokens // 16 + 64), 16)
    for ids in data:
        for stop in range(len(ids) // turns, len(ids), max(len(ids) // turns, 1)):
            pages, chain = clock.run("pages of the prompt, at every turn", pool.match, ids[:stop], stop)
            fresh = pool.take_some(stop // 16 - len(pages))
            clock.run("pages of the prompt, at every turn", pool.publish, chain, ids[len(pages) * 16 : stop], fresh)
            clock.run("pages of the prompt, at every turn", pool.remember, ids[:stop], [*pages, *fresh])
            clock.run("pages of the prompt, at every turn", pool.drop_all, [*pages, *fresh])
    flat = [np.array(ids, dtype=np.int32) for ids in data]
    clock.run("tokens of shared beginnings", shared_tokens, flat)
    rng = np.random.default_rng(0)
    family = [np.concatenate([flat[0], rng.integers(7, 400, 256, dtype=np.int32)]) for _ in range(futures)]
    for name, some in (("conversations", flat), (f"{futures} futures of one", family)):
        clock.run(f"pack {name}", worth_sharing, some)
        layout = clock.run(f"pack {name}", tree, some)
        spans = clock.run(f"pack {name}", PackedAttention, layout, torch.device("cpu"))
        clock.run(f"pack {name}", lambda spans=spans: (spans.keys, spans.readers))
    return clock.parts


def main() -> int:
    """Measure two lengths and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs=2, default=[16384, 65536])
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--futures", type=int, default=16)
    args = parser.parse_args()
    short, long = (measure(args.conversations, tokens, args.turns, args.futures) for tokens in args.tokens)
    times = args.tokens[1] / args.tokens[0]
    print(f"{args.conversations} conversations, {args.turns} turns, CPU seconds of one thread for all of them")
    print(f"{'part':42} {args.tokens[0]:>8} {args.tokens[1]:>8} tokens   growth of time / of tokens")
    for name, seconds in long.items():
        print(f"{name:42} {short[name]:8.3f} {seconds:8.3f}          {seconds / max(short[name], 1e-6) / times:8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
