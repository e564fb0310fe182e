"""CollabLLM end to end on the CPU with no network: build, prepare, five trainings, the table.

`python -m tests.collabllm.smoke [FOLDER]` runs it by the command line's own verbs on a tiny model of random weights,
with scripted users and judges. It shows that the parts fit together, not that anything is learned.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from upshot.models.base import Request

ROOT = Path(__file__).parents[2]
ACTORS = "scripted:collab_actors"
JUDGE = "scripted:tests.collabllm.smoke:judge"
METHODS = ("sft", "dpo", "online-dpo", "ppo", "grpo")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def judge(request: Request) -> str:
    """Prefers letters, so that replies of a model that babbles get different scores."""
    said = "\n".join(message.content for message in request.prompt)  # type: ignore[union-attr]
    talk = said.split("<conversation>")[-1].split("</conversation>")[0]
    reply = talk.split("Assistant:")[-1]
    letters = sum(letter.isalpha() for letter in reply) / max(len(reply), 1)
    if '"accuracy"' in said:
        return json.dumps({"thought": "", "accuracy": int(letters > 0.5)})
    return json.dumps({"thought": "", "interactivity": round(letters, 3)})


def tiny_folder(folder: Path, seed: int = 0) -> Path:
    """A Hugging Face folder with a byte-level tokenizer, a ChatML template and a Llama of about 30,000 weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate([*specials, *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=specials[0], eos_token=specials[2], chat_template=TEMPLATE
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def upshot(*words: str) -> None:
    """Run a verb of the command line in this process."""
    from upshot.cli import main

    code = main(list(words))
    if code:
        raise SystemExit(f"upshot {' '.join(words)}: exit {code}")


def build_data(work: Path, goals: Path) -> None:
    """Candidates of simulated conversations, and from them the files for sft, rl and dpo."""
    who = ["--policy", f"{ACTORS}:policy", "--user", f"{ACTORS}:user", "--judge", f"{ACTORS}:judge"]
    small = ["--split", "all", "--candidates", "3", "--samples", "2", "--max-messages", "6", "--json"]
    upshot("data", "build", "--task", str(goals), "--out", str(work / "built"), *who, *small)
    for purpose in ("sft", "rl", "dpo"):
        source = str(work / "built" / "candidates.parquet")
        kept = ["--for", purpose, "--out", str(work / "data"), "--task", "math-hard", "--system", "none", "--json"]
        upshot("data", "prepare", "--dataset", source, *kept)


def overrides(work: Path, method: str, steps: int) -> list[str]:
    """Overrides that let a recipe for a GPU and a provider run on this machine within seconds."""
    data = work / "data"
    own = {
        "model.path": work / "tiny",
        "model.lora.r": 4,
        "model.max_context": 2048,
        "models.user": f"{ACTORS}:user",
        "models.judge": JUDGE,
        "task.train_file": data / "rl_train.parquet",
        "task.validation_file": data / "rl_validation.parquet",
        "episode.max_tokens": 12,
        "train.steps": steps,
        "train.lr": 0.01,
        "train.prompts_per_step": 4,
        "run_dir": work / "runs" / method,
    }
    if method in ("sft", "dpo"):
        own["train.data"] = data / f"{method}_train.parquet"
    else:
        own |= {"train.group_size": 2, "futures.samples": 2, "futures.rounds": 1}
    if method == "online-dpo":
        own["train.dpo.min_gap"] = 0.01
    return [f"{key}={value}" for key, value in own.items()]


def train(work: Path, method: str, steps: int = 2) -> Path:
    """A short run of a recipe; its last checkpoint."""
    recipe = f"collabllm-{method}"
    upshot("train", recipe, *overrides(work, method, steps), "--dry-run")
    upshot("train", recipe, *overrides(work, method, steps), "--quiet")
    return max((work / "runs" / method / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def evaluate(work: Path, goals: Path, models: dict[str, Path]) -> None:
    """The table over all models."""
    named = ",".join(f"{name}={path}" for name, path in models.items())
    who = ["--user", f"{ACTORS}:user", "--judge", JUDGE, "--models", named]
    small = ["--split", "test", "--max-messages", "4", "--max-tokens", "12", "--out", str(work / "table")]
    upshot("eval", "--task", str(goals), *who, *small)


def smoke(work: Path, goals: int = 20, methods: Sequence[str] = METHODS) -> dict[str, Any]:
    """All stages; returns the table and the metrics of each run."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "offline" / "data")]
    import collab_actors

    started = time.monotonic()

    def tell(what: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {what}", flush=True)

    file = collab_actors.goals(work, goals)
    tell(f"data from {goals} goals")
    build_data(work, file)
    models = {"base": tiny_folder(work / "tiny"), "proactive": work / "tiny"}
    for method in methods:
        tell(f"collabllm-{method}")
        models[method] = train(work, method)
    tell("the table")
    evaluate(work, file, models)
    tell("done")
    lines = {m: (work / "runs" / m / "metrics.jsonl").read_text().splitlines() for m in methods}
    return {
        "table": json.loads((work / "table" / "table.json").read_text()),
        "metrics": {method: [json.loads(line) for line in own] for method, own in lines.items()},
        "checkpoints": models,
    }


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        smoke(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            smoke(Path(folder))
