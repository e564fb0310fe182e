"""The original CollabLLM against `upshot serve`: its session, reward, builder and converters, neither of them changed.

    python -m tests.peers.collabllm_original      # where `collabllm` can be imported (pip install --no-deps collabllm)

The policy, the user and the judge are one model of random weights behind `upshot serve`; a JSON schema with patterns
makes what it says readable for the original's own parser. Prints a line for each part.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("ENABLE_COLLABLLM_LOGGING", "0")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it looks up prices on the network first
NAME = "random"
TASK = {"task_desc": "question answering", "single_turn_prompt": "What is 2 + 2?"}
METRICS = ["kindness", "answer->length"]


def words(**keys: int) -> dict[str, Any]:
    """A response format of short texts (or, for 0, a number from 0 to 9)."""
    text = {key: {"type": "string", "pattern": f"^[a-z ]{{1,{most}}}$"} for key, most in keys.items() if most}
    numbers = {key: {"type": "integer", "minimum": 0, "maximum": 9} for key, most in keys.items() if not most}
    schema = {"type": "object", "properties": text | numbers, "required": list(keys), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


def save_random_model(folder: Path) -> None:
    """A Llama of random weights whose tokens are bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tests.templates import CHATML

    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*special, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = {"pad_token": "<pad>", "eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **marks)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(vocab), max_position_embeddings=8192, eos_token_id=2, pad_token_id=0, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The model behind `upshot serve`; yields the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "upshot.cli", "serve", str(folder), "--name", NAME, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                break
            if process.poll() is not None:
                raise RuntimeError("upshot serve ended early")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def register_metrics() -> None:
    """Two metrics of the original's own kind: a judge by litellm, and one behind an arrow."""
    import litellm
    from collabllm.metric import BaseMetric, SingleTurnOrChatMetric
    from collabllm.utils.extract_json_reliable import extract_json

    @SingleTurnOrChatMetric.register_metric("kindness")
    class Kindness(BaseMetric):
        def __init__(self, **llm: Any) -> None:
            self.llm = {**llm, "response_format": words(kindness=0)}

        def score(
            self, prompt: Any, groundtruth: Any, completion: Any, messages: Any = None, metadata: Any = None
        ) -> Any:
            asked = [{"role": "user", "content": f"How kind? {messages[-1]['content']}"}]
            said = litellm.completion(**self.llm, messages=asked).choices[0].message.content
            return float(extract_json(said)["kindness"])

    @SingleTurnOrChatMetric.register_metric("length")
    class Length(BaseMetric):
        def score(
            self, prompt: Any, groundtruth: Any, completion: Any, messages: Any = None, metadata: Any = None
        ) -> Any:
            return float(len(completion))


def check_session(policy: dict[str, Any], user: dict[str, Any]) -> str:
    """`ChatSessionSimulator`: futures of a conversation in progress."""
    from collabllm.simulation import ChatSessionSimulator

    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    kwargs = {"assistant_generation_kwargs": policy, "user_generation_kwargs": user}
    sessions = ChatSessionSimulator().run_chat_simulation(
        **TASK, chat_history=history, num_samples=2, max_new_turns=4, verbose=False, **kwargs
    )
    assert len(sessions) == 2 and all(session[:2] == history and len(session) == 6 for session in sessions)
    assert [m["role"] for m in sessions[0]] == ["user", "assistant"] * 3
    return f"{len(sessions)} sessions of {len(sessions[0])} messages"


def check_reward(policy: dict[str, Any], user: dict[str, Any], judge: dict[str, Any]) -> str:
    """`multiturn_aware_reward`, with an extraction behind one of its metrics."""
    from collabllm.reward import multiturn_aware_reward

    rewards, sessions = multiturn_aware_reward(
        **TASK,
        single_turn_completion="4",
        metric_names=METRICS,
        metric_weights=[1.0, -0.1],
        metadata={"extraction_requirement": "A number."},
        chat_history=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
        assistant_generation_kwargs=policy,
        user_generation_kwargs=user,
        reward_generation_kwargs=judge,
        num_samples=2,
        max_new_turns=2,
        return_details=True,
        verbose=False,
    )
    assert set(rewards) == {*METRICS, "MR"} and len(sessions) == 2
    sums = [kind - 0.1 * length for kind, length in zip(*(rewards[name] for name in METRICS), strict=True)]
    assert all(abs(a - b) < 1e-9 for a, b in zip(rewards["MR"], sums, strict=True))
    return f"MR {rewards['MR']}"


def check_builder(policy: dict[str, Any], user: dict[str, Any], judge: dict[str, Any], folder: Path) -> str:
    """`generate_multiturn_dataset`, its JSON file read by `upshot data prepare`."""
    from collabllm.datasets.multiturn import MultiturnDataset
    from collabllm.synthetic import generate_multiturn_dataset

    from upshot.offline.data.prepare import PrepareSettings, prepare

    built = [
        generate_multiturn_dataset(
            **{**TASK, "single_turn_prompt": goal},
            single_turn_completion="4",
            single_turn_metadata={"extraction_requirement": "A number.", "level": "5"},
            metric_names=METRICS,
            assistant_generation_kwargs=policy,
            user_generation_kwargs=user,
            reward_generation_kwargs=judge,
            proact_prompt_ratio=0.0,
            num_candidate_responses=2,
            max_total_turns=4,
            max_new_turns=1,
            num_samples=1,
        )
        for goal in ("What is 2 + 2?", "What is 3 + 1?")
    ]
    file = folder / "math-hard_multiturn.json"
    file.write_text(json.dumps(built))
    rows = {
        p: sum(prepare(str(file), folder / p, PrepareSettings(p, min_gap=0.0)).rows.values()) for p in ("sft", "rl")
    }
    theirs = MultiturnDataset(built)
    assert rows == {"sft": 2, "rl": len(theirs.to_inputs_dataset()["train"])}
    return f"{len(theirs)} candidates → {rows}"


def check_converters(url: str, folder: Path) -> str:
    """`upshot data build`'s file, read by the original's `MultiturnDataset` and its converters."""
    import pyarrow.parquet
    from collabllm.datasets.multiturn import MultiturnDataset

    goals = folder / "goals.jsonl"
    goals.write_text(
        "\n".join(json.dumps({"goal": f"What is {n} + 2? Tell me.", "reference": str(n + 2)}) for n in range(3))
    )
    command = [sys.executable, "-m", "upshot.cli", "data", "build", "--task", str(goals), "--split", "all"]
    command += ["--policy", f"{url}#{NAME}", "--user", "script", "--metrics", "token_amount=-0.01"]
    command += ["--candidates", "2", "--samples", "1", "--rounds", "1", "--max-messages", "4", "--max-tokens", "12"]
    subprocess.run([*command, "--out", str(folder / "built"), "--json"], check=True, stdout=subprocess.DEVNULL)
    rows = pyarrow.parquet.read_table(folder / "built" / "candidates.parquet").to_pylist()
    sizes = {
        "sft": len(MultiturnDataset(rows).to_sft_dataset(lower_bound_metric="rewards.MR", lower_bound=-1e9)["train"]),
        "dpo": len(MultiturnDataset(rows).to_dpo_dataset()["train"]),
        "inputs": len(MultiturnDataset(rows).to_inputs_dataset()["train"]),
    }
    assert all(sizes.values())
    return f"{len(rows)} candidates → {sizes}"


def main() -> None:
    """All parts, in order."""
    register_metrics()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_random_model(folder / "model")
        with served(folder / "model") as url:
            policy = {"model": f"openai/{NAME}", "api_base": url, "api_key": "none", "max_tokens": 8}
            user = {**policy, "max_tokens": 200, "response_format": words(current_answer=8, thought=8, response=12)}
            judge = {**policy, "max_tokens": 200, "response_format": words(thought=8, final_completion=8)}
            print("session    ", check_session(policy, user), flush=True)
            print("reward     ", check_reward(policy, user, judge), flush=True)
            print("builder    ", check_builder(policy, user, judge, folder), flush=True)
            print("converters ", check_converters(url, folder), flush=True)


if __name__ == "__main__":
    main()
