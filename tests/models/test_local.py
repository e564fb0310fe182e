"""Models in this process: a folder in Hugging Face's format, and SmolLM2 without a network."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.models.base import ModelCallError, Request
from upshot.models.connect import connect, connect_all
from upshot.models.local import adapter_config, load_local, load_whole, local_path, pick_dtype, shared_kv
from upshot.models.smollm2 import smollm2_folder
from upshot.models.structured import ask_json

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a byte-level tokenizer, saved as a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def test_a_folder_answers_with_ids_and_log_probabilities_and_its_seed_repeats(folder):
    async def run():
        async with connect(folder, role="user") as model:
            assert model.abilities.ids_in
            request = Request([Message("user", "hi")], Sampling(max_tokens=6, seed=3), n=2)
            first, second = await model.generate(request), await model.generate(request)
            return first, second, model.stats()

    first, second, stats = asyncio.run(run())
    assert [c.ids for c in first] == [c.ids for c in second]
    assert all(c.logprobs is not None and len(c.logprobs) == len(c.ids or ()) for c in first)
    assert stats["user/calls"] == 2
    assert stats["user/completion_tokens"] == sum(len(c.ids or ()) for c in first + second)


def test_roles_with_the_same_folder_load_it_once(folder):
    models = connect_all({"user": folder, "judge": f"local:{folder}", "third": folder})
    assert models["user"] is models["third"]


def test_the_cpu_computes_in_float32(folder):
    import torch

    module, tokenizer = load_local(folder, device="cpu")
    assert module.dtype == torch.float32
    assert tokenizer.eos_token == "<|im_end|>"


def test_a_local_model_can_be_called_only_while_it_is_loaded(folder):
    async def run():
        model = connect(folder)
        with pytest.raises((UserError, ModelCallError)):
            await model.generate(Request([Message("user", "hi")]))

    asyncio.run(run())


@pytest.mark.parametrize("name", ["./no/such/folder", "local:/no/such"])
def test_a_missing_folder_is_named(name):
    with pytest.raises(UserError, match="there is no folder"):
        local_path(name)


def test_a_folder_that_holds_no_model_is_named(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        local_path(str(tmp_path))


@pytest.mark.slow
def test_smollm2_is_converted_once_with_the_right_end_tokens_and_constants(smollm2):
    config = json.loads((Path(smollm2) / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    module, tokenizer = load_local(smollm2)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )
    assert module.generation_config.eos_token_id == 2
    assert sum(p.numel() for p in module.parameters()) == 134_515_008


@pytest.mark.slow
def test_smollm2_tokenizes_digits_one_by_one_and_renders_chatml(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert "|".join(tokenizer.tokenize("It costs $1,234.50")) == "It|Ġcosts|Ġ$|1|,|2|3|4|.|5|0"
    for text in ("Janet’s 16 ducks\n\n\tlay é ∑ 你好 🙂  ", "a  b", "x = 10**12"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(text).input_ids[:2] == [1, 9690]


@pytest.mark.slow
def test_smollm2_answers_a_question(smollm2, monkeypatch):
    monkeypatch.setenv("UPSHOT_CACHE", str(Path(smollm2).parent))

    async def run():
        async with connect("smollm2-135m", role="user") as model:
            question = Request([Message("user", "What is the capital of France?")], Sampling(32, temperature=0))
            return (await model.generate(question))[0]

    completion = asyncio.run(run())
    assert "Paris" in completion.text
    assert completion.finish == "stop"


@pytest.mark.slow
def test_smollm2_gives_json_or_says_bad_json(smollm2, monkeypatch):
    monkeypatch.setenv("UPSHOT_CACHE", str(Path(smollm2).parent))
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

    async def run():
        async with connect("smollm2-135m", role="judge") as model:
            question = [Message("user", "Which city is the capital of France?")]
            calls = (ask_json(model, question, schema, Sampling(48, 0.7, seed=i), repairs=1) for i in range(4))
            return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(run())
    assert all(isinstance(a, dict) or (isinstance(a, ModelCallError) and a.reason == "bad_json") for a in answers)
    assert all(isinstance(a["city"], str) for a in answers if isinstance(a, dict))
    print(answers)


def test_changed_weights_in_a_folder_are_a_different_model_for_the_cache(folder, tmp_path):
    async def run():
        async with connect({"model": folder, "cache": str(tmp_path)}) as model:
            await model.generate(Request([Message("user", "hi")], Sampling(max_tokens=2, seed=3)))
            return model.identity, model.stats()["cache_hits"]

    first, again = asyncio.run(run()), asyncio.run(run())
    assert again == (first[0], 1)
    os.utime(Path(folder) / "config.json", ns=(time.time_ns(), time.time_ns()))
    changed = asyncio.run(run())
    assert changed[0] != first[0]
    assert changed[1] == 0


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("UPSHOT_CACHE", str(tmp_path))
    monkeypatch.setattr("upshot.models.smollm2.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gguf"):
        smollm2_folder()


def test_a_prompt_that_is_too_long_for_the_model_is_a_failed_call_not_the_end_of_the_run(folder):
    async def run():
        async with connect(folder, role="judge") as model:
            with pytest.raises(ModelCallError) as caught:
                await model.generate(Request([Message("user", "x" * 4000)], Sampling(max_tokens=6)))
            (answer,) = await model.generate(Request([Message("user", "x")], Sampling(max_tokens=6)))
            return caught.value.reason, answer.completion_tokens

    reason, tokens = asyncio.run(run())
    assert reason == "too_long" and tokens > 0


def test_models_connected_together_without_a_plan_have_one_budget_for_keys_and_values(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"model": folder, "temperature": 0}
    given = {"model": folder, "kv_gb": 1.0}
    models = connect_all({"user": folder, "same": folder, "judge": other, "given": given, "far": "scripted:echo"})
    assert [getattr(models[role], "sharers", None) for role in ("user", "judge", "given", "far")] == [2, 2, 1, None]
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (600, 1000))
    assert [shared_kv("cuda", n) for n in (1, 2, 4)] == [0, 100, 50] and shared_kv("cpu", 4) == 0


IMPORTING = """
import gc
from upshot.models.local import adapter_config, import_frameworks
runs = []
gc.callbacks.append(lambda phase, info: runs.append(phase))
import_frameworks()
assert not runs and gc.isenabled() and gc.get_freeze_count() > 100_000 and gc.get_threshold()[0] == 50_000
frozen = gc.get_freeze_count()
import_frameworks()
assert gc.get_freeze_count() == frozen
"""


def test_garbage_collection_is_off_during_imports_and_on_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nothing is reported as leaked at the end"


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off"])
def test_damaged_weights_are_one_clear_line(content, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot load the model '.*/m': .*cut off, damaged") as refused:
        load_local(str(tmp_path / "m"))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_a_damaged_adapter_configuration_is_named(folder, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter_config.json is not valid JSON"):
        load_whole(str(tmp_path))


@pytest.mark.parametrize("name", ["-1", "http://"])
def test_a_name_that_the_hub_cannot_have_is_one_clear_line(name):
    with pytest.raises(UserError, match="neither a folder nor a model of the Hugging Face hub"):
        adapter_config(name, offline=True)


@pytest.mark.parametrize(("computes", "kind"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_bfloat16_only_if_the_gpu_computes_in_it(computes, kind, monkeypatch):
    """A T4 and a V100 only emulate it."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda emulated=True: emulated or computes)
    assert str(pick_dtype("auto", "cuda:1")) == f"torch.{kind}" and str(pick_dtype("auto", "cpu")) == "torch.float32"
