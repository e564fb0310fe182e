"""vLLM's tokens per second on the same work as the rows of generate.py and long.py, as their peer.

    python benchmarks/vllm_generate.py --shape 8b --weights bf16
    python benchmarks/vllm_generate.py --shape 8b --weights fp8 --kv fp8
    python benchmarks/vllm_generate.py --rows "4 x 32,768 -> 16" "64 x 8,192 -> 128" --repeats 1   # long.py --vllm does

Random weights and prompts; every reply has full length and the log-probability of every id; prefixes are cached as vLLM
does by default. In CollabLLM's shape a reply's futures begin as soon as it has ended, as in generate.py. vLLM gets no
seeds, because they would slow it down; our engine gets one for each request.

Prints the seconds until vLLM was ready and the tokens/s of each round; the first is a warm-up. It needs vLLM and a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.generate import COLLAB, SHAPES, ids_of

Ended = Callable[[list[int]], None]
Work = Callable[["Requests", random.Random, int], float]


class Requests:
    """Requests to vLLM's engine; what comes after one of them is asked when it has ended."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.numbers = itertools.count()
        self.open: dict[str, tuple[list[int], Ended]] = {}
        self.made = 0

    def submit(self, ids: list[int], new: int, ended: Ended = lambda _: None) -> None:
        """Ask for `new` ids behind these; `ended` is called with all of them."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = str(next(self.numbers))
        self.open[name] = ids, ended
        rules = SamplingParams(
            max_tokens=new,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.engine.add_request(name, {"prompt_token_ids": ids}, rules)

    def run_until_done(self) -> None:
        """Step until nothing is open."""
        while self.open:
            for output in self.engine.step():
                if output.finished:
                    ids, ended = self.open.pop(output.request_id)
                    reply = list(output.outputs[0].token_ids)
                    self.made += len(reply)
                    ended([*ids, *reply])


def batch_rows(size: tuple[int, int, int], requests: Requests, rng: random.Random, vocab: int) -> float:
    """Prompts of this many ids, this many new ids for each; when the clock started."""
    prompts, ids, new = size
    rows = [ids_of(rng, vocab, ids) for _ in range(prompts)]
    began = time.perf_counter()
    for row in rows:
        requests.submit(row, new)
    return began


def collab_rows(requests: Requests, rng: random.Random, vocab: int) -> float:
    """Replies to each prompt, each forked into futures of rounds; when the clock started."""
    size = COLLAB
    futures = size["prompts"] * size["replies"] * size["futures"]
    rows = [ids_of(rng, vocab, size["prompt"]) for _ in range(size["prompts"])]
    said = [ids_of(rng, vocab, size["given"]) for _ in range(futures * size["rounds"])]

    def go_on(ids: list[int], left: int) -> None:
        if left:
            requests.submit([*ids, *said.pop()], size["new"], lambda after: go_on(after, left - 1))

    def replied(ids: list[int]) -> None:
        for _ in range(size["futures"]):
            go_on(ids, size["rounds"])

    began = time.perf_counter()
    for ids in rows:
        for _ in range(size["replies"]):
            requests.submit(ids, size["reply"], replied)
    return began


LONG = {"4 x 32,768 -> 16": (4, 32768, 16), "64 x 8,192 -> 128": (64, 8192, 128)}
WORK: dict[str, Work] = {
    "256 prompts": partial(batch_rows, (256, 256, 256)),
    "CollabLLM": collab_rows,
    **{name: partial(batch_rows, size) for name, size in LONG.items()},
}


def write_config(folder: Path, name: str, longest: int) -> None:
    """A Llama of the shape, as vLLM reads it; weights it makes up itself."""
    from transformers import LlamaConfig

    shape = SHAPES[name]
    config = LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        max_position_embeddings=longest,
        tie_word_embeddings=bool(shape.get("tied", 1)),
    ).to_dict()
    folder.joinpath("config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"})
    )


def main() -> int:
    """Start vLLM and time it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--weights", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--kv", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--rows", nargs="*", choices=list(WORK), default=["256 prompts", "CollabLLM"])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    from vllm import LLM

    way = f"{options.shape}, weights {options.weights}, keys and values {options.kv}"
    with tempfile.TemporaryDirectory() as folder:
        longest = 33024 if set(options.rows) & set(LONG) else 2048
        write_config(Path(folder), options.shape, longest)
        began = time.perf_counter()
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=1024 if longest == 2048 else 256,
            quantization="fp8" if options.weights == "fp8" else None,
            kv_cache_dtype=options.kv,
            gpu_memory_utilization=0.85,
        )
        print(f"vLLM, {way}: up after {time.perf_counter() - began:.0f} s", flush=True)
    vocab = SHAPES[options.shape]["vocab"]
    for row in options.rows:
        for number in range(options.repeats + 1):
            requests = Requests(llm)
            began = WORK[row](requests, random.Random(number), vocab)
            requests.run_until_done()
            took = time.perf_counter() - began
            print(f"{row}: {requests.made / took:,.0f} tokens/s ({requests.made} in {took:.2f} s)", flush=True)
            print(json.dumps({"row": row, "seconds": took}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
