"""A product in miniature: calls of the shop, answered by a weak policy, as a chat log with outcomes.

    python examples/shop_logs.py --run runs/weak --conversations 2000 --out shop.jsonl

RUN is a policy of the recipe `shop`, such as `upshot train shop train.steps=0 run_dir=runs/weak` (imitation only).
A line has messages (tool answers have the role tool), the customer, what the call is about, and whether it was solved.
Lines are appended as they are played; the same command continues where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from upshot.config.load import load_recipe
from upshot.core.conversation import Conversation
from upshot.core.files import append_jsonl, read_jsonl
from upshot.offline.play.opened import open_recipe
from upshot.rollout.play import play_step

AT_ONCE = 500
CUSTOMERS = 3000


def message_of(turn: Any) -> dict[str, Any]:
    """A turn as a product would log it: tool answers have the role tool."""
    role, text = turn.message.role, turn.message.content
    if role == "user" and text.startswith("["):
        name, _, answer = text[1:].partition("] ")
        return {"role": "tool", "name": name, "content": answer}
    return {"role": role, "content": text}


def line_of(talk: Conversation, solved: float, number: int, seed: int) -> dict[str, Any]:
    """A conversation of the log."""
    kind = "refund" if "refund" in talk.messages[0].content else "line"
    metadata = {"customer": f"c{seed}-{number % CUSTOMERS}", "kind": kind}
    return {"messages": [message_of(turn) for turn in talk.turns], "solved": bool(solved), "metadata": metadata}


async def play(run: str, count: int, out: Path, seed: int) -> None:
    """Play the missing part of the log."""
    recipe = load_recipe("shop", [f"task.rows_per_split={count}", f"task.seed={seed + 1000}"]).recipe
    done = len(read_jsonl(out)) if out.is_file() else 0
    if done >= count:
        return
    async with open_recipe(recipe, run) as opened:
        rows = opened.task.rows("train")
        for start in range(done, count, AT_ONCE):
            groups = await play_step(opened.context, rows[start : start + AT_ONCE], 1, seed)
            replies = [group[0] for group in groups]
            scored = [(reply, reply.reward.means["verifier"].value) for reply in replies]
            lines = [
                line_of(
                    reply.futures[0].conversation if reply.futures else reply.conversation, solved, start + at, seed
                )
                for at, (reply, solved) in enumerate(scored)
                if solved is not None
            ]
            append_jsonl(out, lines)


def main() -> None:
    """Parse the options and play."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="run folder of the weak policy")
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    asyncio.run(play(args.run, args.conversations, args.out, args.seed))
    print(json.dumps({"conversations": len(read_jsonl(args.out)), "file": str(args.out)}))


if __name__ == "__main__":
    main()
