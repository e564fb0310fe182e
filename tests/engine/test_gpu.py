"""Every family, with and without adapters, on a GPU: greedy ids and log-probabilities match the model's own forward."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import pytest
import torch

from tests.engine.conftest import tiny_llama
from tests.engine.test_families import BLOCK, FAMILIES, build
from tests.patience import wait_until
from upshot.engine.cuda.steps import COMPILING
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.sequence import Rules, Sequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(900),
]
ADAPTERS = {
    "Llama with LoRA": ["q_proj", "v_proj", "down_proj"],
    "Llama with LoRA on all products": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "Llama with LoRA on embedding and head": ["embed_tokens", "lm_head"],
}
NAMES = [*(family for family, _ in FAMILIES), *ADAPTERS]
FUSED = {*(family for family, _ in BLOCK), *ADAPTERS}
PROMPTS = [[3 + (5 * i + j) % 90 for j in range(4 + 7 * i)] for i in range(4)]


def make(name: str, dtype: torch.dtype) -> torch.nn.Module:
    """A small model of the family on the GPU."""
    if name not in ADAPTERS:
        return build(name, dict(FAMILIES)[name]).to("cuda", dtype)
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, lora_dropout=0.3, target_modules=ADAPTERS[name], init_lora_weights=False)
    return get_peft_model(tiny_llama(vocab_size=97), lora).to("cuda", dtype).train()


def engine_on(model: torch.nn.Module, **over: Any) -> Engine:
    """An engine with a small cache."""
    settings = {"kv_bytes": 64 << 20, "max_running": 64, **over}
    engine = Engine(model, eos_ids=set(), settings=EngineSettings(**settings))
    wait_until(lambda: not COMPILING)  # until then no step is captured
    return engine


def shift(model: torch.nn.Module) -> None:
    """What an optimizer does: change values in place."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)


def generate(engine: Engine, n: int = 1, temperature: float = 0.0) -> list[Sequence]:
    rules = [Rules(max_tokens=16, temperature=temperature, seed=i) for i in range(len(PROMPTS))]
    seqs = [s for p, r in zip(PROMPTS, rules, strict=True) for s in engine.submit(p, r, n=n)]
    engine.run_until_done()
    return seqs


def plain_logprobs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """The model's own log-probabilities, without a cache and without dropout."""
    training = model.training
    model.eval()
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([ids], device="cuda"), use_cache=False).logits[0].float().log_softmax(-1)
    model.train(training)
    return rows.cpu()


def assert_greedy(model: torch.nn.Module, seqs: list[Sequence]) -> None:
    for seq in seqs:
        ids = list(seq.ids[: seq.prompt_len])
        while len(ids) < len(seq.ids):
            ids.append(int(plain_logprobs(model, ids)[-1].argmax()))
        assert seq.ids == ids


def assert_close(model: torch.nn.Module, seqs: list[Sequence], mean: float) -> None:
    gaps = []
    for seq in seqs:
        rows = plain_logprobs(model, seq.ids)
        own = torch.stack([rows[i - 1, seq.ids[i]] for i in range(seq.prompt_len, len(seq.ids))])
        gaps.append((own - torch.tensor(seq.logprobs)).abs())
    gap = torch.cat(gaps)
    assert float(gap.mean()) < mean, f"mean {float(gap.mean()):.3g}, largest {float(gap.max()):.3g}"


@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids_are_the_models_own_and_follow_its_weights(name: str) -> None:
    model = make(name, torch.float32)
    engine = engine_on(model)
    assert (type(engine.runner.driver).__name__ == "FusedDriver") == (name in FUSED)
    assert_greedy(model, generate(engine))
    shift(model)
    engine.weights_changed()
    assert_greedy(model, generate(engine))


@pytest.mark.parametrize("name", NAMES)
def test_sampled_logprobs_in_bfloat16_are_near_the_models_own(name: str) -> None:
    model = make(name, torch.bfloat16)
    assert_close(model, generate(engine_on(model), n=5, temperature=1.0), mean=0.15)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_given_ids_have_the_models_own_log_probabilities(name: str, dtype: torch.dtype) -> None:
    model = make(name, dtype)
    engine = engine_on(model, chunk_tokens=64)
    ids = [3 + (7 * i) % 90 for i in range(150)]
    seqs = [
        engine.score(ids[:start], ids[start : start + count], top=2) for start, count in ((1, 149), (40, 9), (40, 60))
    ]
    sampled = engine.submit(ids[:50], Rules(max_tokens=4))
    engine.run_until_done()
    assert_close(model, [*seqs, *sampled], mean=1e-4 if dtype == torch.float32 else 0.15)
    assert [len(seq.tops) for seq in seqs] == [149, 9, 60] and engine.pool.held == 0


def test_captured_steps_share_one_buffer_for_logits() -> None:
    engine = engine_on(make("Llama", torch.bfloat16))
    for n in (1, 3, 7, 20, 50) * 2:  # what occurs once is not captured
        generate(engine, n=n, temperature=1.0)
    runner = engine.runner
    captured = [*runner.graphs.values(), *runner.prompt_graphs.values()]
    assert len(captured) > 5 and {graph.logits.data_ptr() for graph in captured} == {runner.logits.data_ptr()}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_model_on_another_device_than_the_current_one_is_driven_there() -> None:
    model = make("Llama", torch.float32).to("cuda:1")
    seqs = generate(engine_on(model))
    assert torch.cuda.current_device() == 0
    for seq in seqs:
        with torch.no_grad():
            rows = model(input_ids=torch.tensor([seq.ids], device="cuda:1"), use_cache=False).logits[0]
        assert rows[seq.prompt_len - 1 : -1].argmax(-1).tolist() == seq.sampled


@pytest.mark.parametrize("merge", ["copy", "in place"])
def test_a_parked_engine_returns_its_memory_and_resumes(merge: str) -> None:
    model = make("Llama with LoRA on all products", torch.float32)
    before = [weight.detach().clone() for weight in model.parameters()]
    engine = engine_on(model, merge=merge)
    seqs = [engine.submit(ids, Rules(max_tokens=16, temperature=0))[0] for ids in PROMPTS]
    for _ in range(6):
        engine.step()
    full = torch.cuda.memory_allocated()
    engine.park()
    assert full - torch.cuda.memory_allocated() > 48 << 20, "pages and captured steps"
    assert all(torch.equal(weight, values) for weight, values in zip(model.parameters(), before, strict=True))
    engine.run_until_done()
    engine.park()
    assert_greedy(model, seqs)
    assert all(torch.equal(weight, values) for weight, values in zip(model.parameters(), before, strict=True))


def test_concurrent_engines_each_sample_from_their_own_model() -> None:
    """Captured steps of several engines run at once; products of one must not write into another's workspace.

    Whether they do is a matter of chance: without separate workspaces, every second run of this test failed.
    """
    models = [_llama(width) for width in (32, 64, 96, 128)]
    engines = [engine_on(model, own_stream=True) for model in models]
    said: list[tuple[torch.nn.Module, Sequence]] = []

    async def say(engine: Engine, ids: list[int], seed: int) -> Sequence:
        done = asyncio.get_running_loop().create_future()
        (seq,) = engine.submit(ids, Rules(max_tokens=16, seed=seed), on_done=lambda _: done.set_result(None))
        engine.wake()
        await done
        return seq

    async def talk(number: int) -> None:
        ids = [3 + (7 * number + i) % 90 for i in range(5 + number % 11)]
        for turn in range(3):
            replies = await asyncio.gather(*(say(engine, ids, 100 * number + turn) for engine in engines))
            said.extend(zip(models, replies, strict=True))
            ids = [*ids, *replies[turn].sampled, 3 + number % 90]

    async def talk_all() -> None:
        await asyncio.gather(*(talk(number) for number in range(24)))

    asyncio.run(talk_all())
    assert len(said) == 24 * 3 * 4
    for model, seq in said:
        rows = plain_logprobs(model, list(seq.ids))[seq.prompt_len - 1 : -1]
        plain = rows[torch.arange(len(seq.sampled)), torch.tensor(seq.sampled)]
        torch.testing.assert_close(torch.tensor(seq.logprobs), plain, atol=1e-3, rtol=0)


def _llama(width: int) -> torch.nn.Module:
    return tiny_llama(vocab_size=97, hidden_size=width, num_attention_heads=2, num_key_value_heads=2).to("cuda")


def test_kernels_compiled_ahead_wait_for_what_they_read() -> None:
    """With compiled kernels on disk they are launched at once, while the device may still be busy."""
    plain = [seq.sampled for seq in generate(engine_on(make("Llama", torch.bfloat16)))]
    model = make("Llama", torch.bfloat16)
    for size in (256, 1 << 12, 1 << 20, 1 << 24, 1 << 26):  # reused memory: read as numbers, far out of range
        for piece in [torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda") for _ in range(8)]:
            del piece
    torch.cuda._sleep(1 << 30)
    assert [seq.sampled for seq in generate(engine_on(model))] == plain


def needs_8_bits() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no 8-bit products before Hopper")


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral", "SmolLM3", *ADAPTERS])
def test_in_8_bits_captured_steps_sample_near_the_model_and_follow_its_weights(name: str) -> None:
    needs_8_bits()
    model = make(name, torch.bfloat16)
    engine = engine_on(model, weights="fp8")
    assert_close(model, generate(engine, n=5, temperature=1.0), mean=0.4)
    captured = dict(engine.runner.graphs)
    shift(model)
    engine.weights_changed()
    assert captured and engine.runner.graphs == captured, "they read the new weights where the old ones lay"
    assert_close(model, generate(engine, n=5, temperature=1.0), mean=0.4)
    engine.park()
    assert_close(model, generate(engine, n=5, temperature=1.0), mean=0.4)


@pytest.mark.parametrize("weights", ["model", "fp8"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral"])
def test_keys_and_values_in_8_bits_are_near_the_model(name: str, weights: str) -> None:
    needs_8_bits()
    model = make(name, torch.bfloat16)
    engine = engine_on(model, weights=weights, kv="fp8")
    assert_close(model, generate(engine, n=5, temperature=1.0), mean=0.4)
    engine.park()
    assert_close(model, generate(engine, n=5, temperature=1.0), mean=0.4)


@pytest.mark.parametrize("rows", [1, 20, 60, 100, 200, 300])
def test_in_8_bits_results_do_not_depend_on_the_number_of_rows(rows: int) -> None:
    """Small and large numbers of rows use different products."""
    needs_8_bits()
    model = make("Llama", torch.bfloat16)
    engine = engine_on(model, weights="fp8", max_running=512)
    seqs = [s for i in range(rows) for s in engine.submit([5, 6, 7, 3 + i % 80], Rules(max_tokens=3, seed=i))]
    engine.run_until_done()
    assert_close(model, seqs[:20], mean=0.4)


def test_a_frozen_model_in_8_bits_has_no_other_weights() -> None:
    needs_8_bits()
    from upshot.engine.llama.eight_bit import narrow_projections

    model = make("Llama", torch.bfloat16)
    narrow_projections(model)
    engine = engine_on(model, weights="fp8", own_stream=True)
    assert_close(model, generate(engine, n=5, temperature=1.0), mean=0.4)
    widths = {w.element_size() for name, w in model.named_parameters() if name.endswith("_proj.weight")}
    assert widths == {1}
