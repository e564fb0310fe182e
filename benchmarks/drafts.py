"""How often do siblings' replies predict the next tokens? An estimate of what drafts made from them could gain.

    python benchmarks/drafts.py --rows 12 --temperature 1.0 --out rollouts.json     # CPU, minutes: samples, then counts
    python benchmarks/drafts.py --read rollouts.json                                # counts only

A draft continues the longest n-gram (up to `--gram`) with which the reply ends and which a sibling contains. A draft
token from one fixed guess is accepted with the probability that the model gives it. Sampling x from the model and
accepting if x is the guess is the same event, so replaying kept replies counts exactly what exact rejection sampling
would accept. Prints the tokens that a verify step yields, by the length of the draft and by its source: finished
siblings (all others: the best case), or what the siblings of the same batch have said by then. Nothing is timed here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LENGTHS = (2, 4, 8)
STEP_US = {1: 120.0, 8: 122.0, 64: 144.0, 256: 185.0, 512: 307.0, 1024: 603.0, 2304: 1390.0}
"""The four products of one 8B layer on an H200 by rows: what a verify step costs at least. Measured from 64 to 1,024
(bfloat16); below that by the bytes of the weights, above by their arithmetic."""
BATCHES = (1, 8, 64, 256)


def guess(texts: list[list[int]], ends: list[int], tail: list[int], gram: int, length: int) -> list[int]:
    """The continuation of the longest end of `tail` found in the texts (each up to its end), the latest first."""
    for n in range(min(gram, len(tail)), 0, -1):
        want = tail[-n:]
        for text, end in zip(texts, ends, strict=True):
            for at in range(end - n - 1, -1, -1):
                if text[at : at + n] == want:
                    return text[at + n : min(at + n + length, end)]
    return []


def replay(group: list[list[int]], prompt: list[int], length: int, gram: int, live: bool) -> tuple[int, int]:
    """(verify steps, tokens) of one group's replies with drafts of a length."""
    steps = tokens = 0
    for own, reply in enumerate(group):
        others = [prompt[-256:], *(text for index, text in enumerate(group) if index != own)]
        at = 0
        while at < len(reply):
            ends = [len(text) if not live or index == 0 else min(at, len(text)) for index, text in enumerate(others)]
            draft = guess(others, ends, (prompt[-gram:] + reply[:at])[-gram:], gram, length)
            hit = 0
            while hit < len(draft) and reply[at + hit : at + hit + 1] == [draft[hit]]:
                hit += 1
            taken = min(hit + 1, len(reply) - at)
            steps, tokens, at = steps + 1, tokens + taken, at + taken
    return steps, tokens


def cost(rows: float) -> float:
    """Microseconds of a layer's products for this many rows, interpolated linearly between the measured ones."""
    known = sorted(STEP_US)
    low = max((r for r in known if r <= rows), default=known[0])
    high = min((r for r in known if r >= rows), default=known[-1])
    if low == high:
        return STEP_US[low]
    return STEP_US[low] + (STEP_US[high] - STEP_US[low]) * (rows - low) / (high - low)


def report(kept: list[dict[str, object]], gram: int) -> None:
    """Tokens a step, and what that is worth."""
    for live in (False, True):
        print("siblings of the same batch, as far as they are" if live else "siblings that are finished (best case)")
        for length in LENGTHS:
            steps = tokens = 0
            for item in kept:
                more = replay(item["replies"], item["prompt"], length, gram, live)  # type: ignore[arg-type]
                steps, tokens = steps + more[0], tokens + more[1]
            each = tokens / steps
            worth = {rows: each * cost(rows) / cost(rows * (length + 1)) for rows in BATCHES}
            print(
                f"  draft {length}: {each:.2f} tokens a step; "
                + ", ".join(f"{r} rows {w:.2f}x" for r, w in worth.items())
            )


async def sample(options: argparse.Namespace) -> list[dict[str, object]]:
    """Groups of replies to rows of a task."""
    from upshot.config.sampling import Sampling
    from upshot.engine.engine import Engine
    from upshot.models.base import Request
    from upshot.models.engine_model import EngineModel
    from upshot.models.local import load_local

    module, tokenizer = load_local(options.model, device="cpu")
    model = EngineModel(Engine(module, eos_ids={tokenizer.eos_token_id}), tokenizer, name="policy")
    questions = [json.loads(line)["question"] for line in Path(options.file).read_text().splitlines()][: options.rows]
    asked, prompts = [], []
    for index, question in enumerate(questions):
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        rules = Sampling(max_tokens=options.new, temperature=options.temperature, seed=index)
        prompts.append(list(prompt))
        asked.append(Request(list(prompt), rules, n=options.group))
    found = await model.generate_all(asked)
    return [{"prompt": p, "replies": [list(each.ids) for each in done]} for p, done in zip(prompts, found, strict=True)]


def main() -> None:
    """Sample or read, then count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--file", default="tests/tasks/gsm8k_sample.jsonl")
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--gram", type=int, default=4)
    parser.add_argument("--out", default="")
    parser.add_argument("--read", default="")
    options = parser.parse_args()
    kept = json.loads(Path(options.read).read_text()) if options.read else asyncio.run(sample(options))
    if options.out:
        Path(options.out).write_text(json.dumps(kept))
    report(kept, options.gram)


if __name__ == "__main__":
    main()
