"""vLLM's tokens per second on the shapes of generate.py: the peer of its 'N prompts × M' rows, in bf16 and in fp8.

    python benchmarks/vllm_generate.py --shape 8b --weights bf16
    python benchmarks/vllm_generate.py --shape 8b --weights fp8

Random weights, random prompts that share nothing, every reply of full length with the log-probability of every id.
Prints the seconds until vLLM was up and tokens/s of each round; the first is a warm-up. It needs vLLM and a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.generate import SHAPES


def write_config(folder: Path, name: str) -> None:
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
        max_position_embeddings=2048,
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
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=256, help="ids of a prompt")
    parser.add_argument("--new", type=int, default=256, help="ids of a reply")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), options.shape)
        began = time.perf_counter()
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=1024,
            quantization="fp8" if options.weights == "fp8" else None,
            gpu_memory_utilization=0.85,
        )
        print(f"vLLM, {options.shape}, {options.weights}: up after {time.perf_counter() - began:.0f} s", flush=True)
    rules = SamplingParams(max_tokens=options.new, ignore_eos=True, logprobs=0, detokenize=False)
    draw = random.Random(0)
    for _ in range(options.repeats):
        ids = [
            [draw.randrange(5, SHAPES[options.shape]["vocab"]) for _ in range(options.prompt)]
            for _ in range(options.prompts)
        ]
        began = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": own} for own in ids], rules, use_tqdm=False)
        took = time.perf_counter() - began
        print(f"{sum(len(one.outputs[0].token_ids) for one in done) / took:,.0f} tokens/s ({took:.2f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
