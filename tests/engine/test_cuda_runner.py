"""The GPU's runner end to end: in Triton's interpreter, or on the GPU if there is one.

Tests that are about steps and compare the samples with the model itself pass `check=False`: the engine's own check of
the driver would repeat that comparison and takes longer than the test.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

pytest.importorskip("triton")

from triton.errors import TritonError

from tests.engine.test_families import build
from tests.support.interpreter import hasten_interpreter
from upshot.engine.cuda import runner as cuda_runner
from upshot.engine.cuda.steps import COMPILING, LongRuns
from upshot.engine.cuda.warm import _common, _fused
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.kernels import fp8
from upshot.engine.kernels.decode import DecodePlan
from upshot.engine.llama.eight_bit import narrow_projections
from upshot.engine.llama.merged import MergedWeight
from upshot.engine.sequence import Rules, Sequence
from upshot.serving.swap.layout import lay_out
from upshot.serving.swap.pool import ModelPool

hasten_interpreter()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
Make = Callable[..., LlamaForCausalLM]


def small(make_llama: Make, **over: object) -> LlamaForCausalLM:
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
    }
    return make_llama(**{**sizes, **over}, vocab_size=64, max_position_embeddings=256).to(DEVICE)


def greedy(model: LlamaForCausalLM, prompt: list[int], n: int) -> list[int]:
    ids = torch.tensor([prompt], device=DEVICE)
    return model.generate(ids, max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()


def plain_logprobs(model: LlamaForCausalLM, ids: list[int], start: int) -> torch.Tensor:
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([ids], device=DEVICE)).logits[0].log_softmax(-1).cpu()
    return torch.stack([rows[i - 1, ids[i]] for i in range(start, len(ids))])


def test_futures_of_replies_read_prompt_and_reply_once_and_are_the_models(make_llama: Make) -> None:
    model = small(make_llama)
    settings = EngineSettings(
        page_size=4, kernels=True, check=False, max_running=9, kv_bytes=1 << 20
    )  # no step has nine rows
    engine = Engine(model, eos_ids=set(), settings=settings)
    prompt = [3 + (7 * i) % 60 for i in range(19)]
    replies = [[*prompt, *(3 + (5 * i + reply) % 60 for i in range(17))] for reply in range(3)]
    for reply in replies:  # so that the futures find it
        engine.submit(reply, Rules(max_tokens=1, temperature=0))
    engine.run_until_done()
    futures = [[*reply, 5 + future] for reply in replies for future in range(3)]
    seqs = [engine.submit(ids, Rules(max_tokens=3, temperature=0))[0] for ids in futures]
    engine.run_until_done()
    assert engine.runner.batch.launches and engine.runner.batch.bucket == 10
    for ids, seq in zip(futures, seqs, strict=True):
        assert seq.ids == greedy(model, ids, 3)


def test_forked_greedy_ids_and_logprobs_match_transformers(make_llama: Make) -> None:
    model = small(make_llama)
    engine = Engine(
        model, eos_ids=set(), settings=EngineSettings(page_size=4, kernels=True, max_running=8, kv_bytes=1 << 20)
    )
    assert type(engine.runner.driver).__name__ == "FusedDriver"
    prompt = [3 + (7 * i) % 60 for i in range(18)]  # more than a block of keys; forks diverge within a page
    seqs = engine.submit(prompt, Rules(max_tokens=4, temperature=0), n=3)
    seqs += engine.submit([9, 8, 7], Rules(max_tokens=3, seed=4))
    seqs += engine.submit([9, 8, 7], Rules(max_tokens=4, seed=4, top_k=3, top_logprobs=2))
    engine.run_until_done()
    for seq in seqs[:3]:
        assert seq.ids == greedy(model, prompt, 4)
    for seq in seqs:
        torch.testing.assert_close(
            torch.tensor(seq.logprobs), plain_logprobs(model, seq.ids, seq.prompt_len), atol=2e-4, rtol=1e-3
        )
    assert [len(s.sampled) for s in seqs] == [4] * 3 + [3, 4] and len(seqs[-1].tops) == 4
    assert engine.pool.held == 0


@pytest.mark.parametrize("exact", [False, True])
def test_a_fork_of_a_running_sequence_continues_from_its_last_id_and_leaves_it_alone(
    make_llama: Make, exact: bool
) -> None:
    model = small(make_llama)
    settings = EngineSettings(page_size=4, kernels=True, check=False, max_running=4, kv_bytes=1 << 20, exact=exact)
    engine = Engine(model, eos_ids=set(), settings=settings)
    prompt = [3 + (7 * i) % 60 for i in range(5)]
    [seq] = engine.submit(prompt, Rules(max_tokens=5, temperature=0))
    for _ in range(3):
        engine.step()
    fork = engine.fork(seq, Rules(max_tokens=2, temperature=0))
    assert len(seq.ids) == fork.prompt_len == 8  # three ids were sampled, and the fork reads no prompt
    engine.run_until_done()
    expected = greedy(model, prompt, 5)
    assert (seq.ids, fork.ids) == (expected, expected)


def test_work_begins_while_requests_are_still_being_submitted(
    make_llama: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(make_llama)
    prompts = [[3 + (i * j) % 60 for j in range(1, 6)] for i in range(1, 5)]
    results = []
    for first_chunk in (1 << 20, 12):
        monkeypatch.setattr("upshot.engine.engine.FIRST_CHUNK", first_chunk)
        settings = EngineSettings(page_size=4, kernels=True, check=False, max_running=16, kv_bytes=1 << 20)
        engine = Engine(model, eos_ids=set(), settings=settings)
        engine.on_gpu = True
        seqs = [engine.submit(ids, Rules(max_tokens=2, temperature=0))[0] for ids in prompts]

        began: list[int] = []

        def more(done: object, engine: Engine = engine, seqs: list[Sequence] = seqs, began: list[int] = began) -> None:
            before = engine.steps
            seqs.extend(engine.submit(prompts[0] * 3, Rules(max_tokens=2, temperature=0)))
            began.append(engine.steps - before)

        seqs[1].on_done = more
        # A device may finish the first step before the last request arrives, and begin another.
        assert (engine.steps > 0) == (first_chunk == 12)
        engine.run_until_done()
        results.append([s.ids for s in seqs])
        assert engine.pool.held == 0 and len(seqs) == 5
        assert began == [0]  # no step while results are being taken
    assert results[0] == results[1] and results[0][0] == greedy(model, prompts[0], 2)


def test_a_step_that_fails_during_submission_fails_all_waiting_requests(
    make_llama: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upshot.engine.engine.FIRST_CHUNK", 8)
    model = small(make_llama)
    settings = EngineSettings(page_size=4, kernels=True, check=False, max_running=4, kv_bytes=1 << 20)
    engine = Engine(model, eos_ids=set(), settings=settings)
    engine.on_gpu = True
    ended: list[Sequence] = []
    engine.submit([5, 6, 7, 8, 9], Rules(max_tokens=2), on_done=ended.append)
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "_prefill_logits", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.submit([9, 8, 7, 6, 5], Rules(max_tokens=2), on_done=ended.append)
    assert [type(seq.error) for seq in ended] == [ZeroDivisionError] * 2
    assert not engine.scheduler.busy and engine.pool.held == 0
    [seq] = engine.submit([5, 6, 7], Rules(max_tokens=3, temperature=0))
    engine.run_until_done()
    assert seq.ids == greedy(model, [5, 6, 7], 3)


def test_only_the_first_chunk_of_a_long_prompt_is_small(make_llama: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upshot.engine.engine.FIRST_CHUNK", 8)
    model = small(make_llama)
    settings = EngineSettings(page_size=4, kernels=True, check=False, max_running=4, kv_bytes=1 << 20, chunk_tokens=16)
    engine = Engine(model, eos_ids=set(), settings=settings)
    engine.on_gpu = True
    prompt = [3 + (7 * i) % 60 for i in range(52)]
    [seq] = engine.submit(prompt, Rules(max_tokens=2, temperature=0))
    engine.run_until_done()
    assert engine.steps == 4 + 1 and seq.ids == greedy(model, prompt, 2) and not engine.runner.flights


def test_weights_changed_in_flight_are_recomputed_and_joined_parameters_remain_the_models(make_llama: Make) -> None:
    model = small(make_llama)
    engine = Engine(
        model,
        eos_ids=set(),
        settings=EngineSettings(page_size=4, kernels=True, check=False, max_running=4, kv_bytes=1 << 20),
    )
    [seq] = engine.submit([5, 6, 7, 8, 9], Rules(max_tokens=8, temperature=0))
    for _ in range(4):
        engine.step()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    engine.weights_changed()
    kept = len(seq.ids)
    engine.run_until_done()
    assert 5 < kept < 13 and seq.ids == greedy(model, seq.ids[:kept], 13 - kept)


def test_a_family_without_the_block_runs_through_its_own_forward(make_llama: Make) -> None:
    model = small(make_llama)
    engine = Engine(
        model,
        eos_ids=set(),
        settings=EngineSettings(page_size=4, kernels=True, max_running=4, kv_bytes=1 << 20, lean=False),
    )
    assert type(engine.runner.driver).__name__ == "ModuleDriver"
    [seq] = engine.submit([5, 6, 7, 8, 9], Rules(max_tokens=4, temperature=0))
    engine.run_until_done()
    assert seq.ids == greedy(model, [5, 6, 7, 8, 9], 4)


def test_layers_without_rotation_run_through_the_block(make_llama: Make) -> None:
    sizes = {"head_dim": 16, "num_hidden_layers": 2, "no_rope_layers": [1, 0]}
    model = build("SmolLM3", sizes).to(DEVICE)
    engine = Engine(model, eos_ids=set(), settings=EngineSettings(kernels=True, max_running=4, kv_bytes=1 << 20))
    assert type(engine.runner.driver).__name__ == "FusedDriver"
    [seq] = engine.submit([5, 6, 7, 8, 9], Rules(max_tokens=4, temperature=0))
    engine.run_until_done()
    assert seq.ids == greedy(model, [5, 6, 7, 8, 9], 4)


OPTIONS = {
    "Gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 5.0},
    "Olmo2": {},
    "Phi3": {"head_dim": 24, "partial_rotary_factor": 0.5, "sliding_window": 4},
    "GptOss": {
        "head_dim": 16,
        "num_hidden_layers": 2,
        "sliding_window": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


@pytest.mark.parametrize("family", OPTIONS)
def test_every_option_of_the_block_runs_in_kernels(family: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "attn_implementation": "eager"}
    model = build(family, {**sizes, **OPTIONS[family]}).to(DEVICE)
    engine = Engine(model, eos_ids=set(), settings=EngineSettings(kernels=True, max_running=4, kv_bytes=1 << 20))
    assert type(engine.runner.driver).__name__ == "FusedDriver"
    [seq] = engine.submit([5, 6, 7, 8, 9], Rules(max_tokens=3, seed=4))
    engine.run_until_done()
    expected = plain_logprobs(model, seq.ids, seq.prompt_len)
    torch.testing.assert_close(torch.tensor(seq.logprobs), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["q_proj", "v_proj", "up_proj", "down_proj"]])
def test_adapters_run_through_the_block_and_follow_updates(make_llama: Make, targets: list[str]) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(small(make_llama), peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=targets))
    engine = Engine(
        model.train(),
        eos_ids=set(),
        settings=EngineSettings(page_size=4, kernels=True, max_running=4, kv_bytes=1 << 20),
    )
    assert type(engine.runner.driver).__name__ == "FusedDriver"
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.3)
    engine.weights_changed()
    [seq] = engine.submit([5, 6, 7, 8, 9], Rules(max_tokens=4, seed=3))
    engine.run_until_done()
    assert all(m.training for m in model.modules())
    expected = plain_logprobs(model.eval(), seq.ids, seq.prompt_len)
    torch.testing.assert_close(torch.tensor(seq.logprobs), expected, atol=2e-4, rtol=1e-3)


def smallest(make_llama: Make) -> LlamaForCausalLM:
    """In the dtype that 8-bit products take on the device."""
    model = small(make_llama, hidden_size=32, intermediate_size=32, num_attention_heads=2)
    return model.to(torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)


def narrow_engine(model: torch.nn.Module) -> Engine:
    settings = EngineSettings(page_size=4, kernels=True, max_running=4, kv_bytes=1 << 20, weights="fp8")
    engine = Engine(model, eos_ids=set(), settings=settings)
    assert type(engine.runner.driver).__name__ == "FusedDriver" and engine.runner.driver.narrow
    return engine


def assert_near(engine: Engine, model: torch.nn.Module) -> list[float]:
    """Log-probabilities in 8 bits differ by rounding, but they do differ.

    The interpreter loses the carry where rounding reaches the next power of two.
    """
    [seq] = engine.submit([5, 6, 7, 8, 9], Rules(max_tokens=3, seed=3))
    engine.run_until_done()
    gap = (torch.tensor(seq.logprobs) - plain_logprobs(model, seq.ids, seq.prompt_len).float()).abs()
    assert 1e-4 < float(gap.mean()) < (0.3 if DEVICE.type == "cuda" else 0.8)
    return seq.logprobs


def test_in_8_bits_weights_are_quantized_again_in_place(make_llama: Make) -> None:
    model = smallest(make_llama)
    engine = narrow_engine(model)
    pointers = engine.runner._weight_pointers()
    before = assert_near(engine, model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    engine.weights_changed()
    assert engine.runner._weight_pointers() == pointers, "captured steps read them there"
    assert assert_near(engine, model) != before


@pytest.mark.parametrize("weights", ["model", "fp8"])
def test_keys_and_values_in_8_bits_are_half_as_large_and_nearly_the_same(make_llama: Make, weights: Any) -> None:
    model = smallest(make_llama)
    settings = EngineSettings(page_size=4, kernels=True, max_running=4, kv_bytes=1 << 20, weights=weights, kv="fp8")
    engine = Engine(model, eos_ids=set(), settings=settings)
    wide = Engine(model, eos_ids=set(), settings=replace(settings, kv="model", weights="model"))
    own, theirs = engine.runner.cache.k, wide.runner.cache.k
    assert own.numel() == theirs.numel() and 2 * own.nbytes <= theirs.nbytes
    assert_near(engine, model)
    forks = engine.submit(
        [5, 6, 7, 8, 9, 10], Rules(max_tokens=4, seed=3), n=3
    )  # pages are copied where the forks diverge
    engine.run_until_done()
    for seq in forks:
        gap = torch.tensor(seq.logprobs) - plain_logprobs(model, seq.ids, seq.prompt_len).float()
        assert float(gap.abs().mean()) < 0.8


@pytest.mark.parametrize("kv", ["model", "fp8"])
def test_long_chunks_use_the_librarys_attention(make_llama: Make, kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = smallest(make_llama)
    settings = EngineSettings(
        page_size=4, kernels=True, check=False, max_running=4, kv_bytes=1 << 20, kv=kv, chunk_tokens=16
    )
    prompts = [[3 + (7 * i + n) % 60 for i in range(length)] for n, length in enumerate((34, 5, 9))]
    steps: list[int] = []

    def sampled(long_run: int) -> list[Sequence]:
        engine = Engine(model, eos_ids=set(), settings=settings)
        engine.runner.long_run = long_run
        sequences = [seq for prompt in prompts for seq in engine.submit(prompt, Rules(max_tokens=2, seed=5))]
        engine.run_until_done()
        return sequences

    attend = LongRuns.attend
    monkeypatch.setattr(LongRuns, "attend", lambda self, *how: steps.append(len(self.places)) or attend(self, *how))
    monkeypatch.setattr(cuda_runner, "cudnn_takes", lambda q: True)
    plain, long = sampled(1 << 20), sampled(8)
    assert len(steps) >= 2, "a prompt of several chunks, and short ones beside it"
    for theirs, ours in zip(plain, long, strict=True):
        assert ours.ids == theirs.ids
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=3e-3, rtol=0)


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"r": 160}], ids=["lora", "dora", "of high rank"])
def test_a_copy_in_8_bits_includes_adapters(make_llama: Make, kind: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["k_proj", "v_proj"], **{"r": 4, **kind})
    attention = peft.get_peft_model(smallest(make_llama), lora).get_base_model().model.layers[0].self_attn
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    held = MergedWeight(modules, torch.bfloat16, narrow=True)
    place = held.weight.data_ptr()
    with torch.no_grad():
        for module in modules[1:]:
            module.lora_B["default"].weight.normal_(std=0.2)
    held.refresh()
    merged = MergedWeight(modules, torch.float32).weight
    gap = held.weight.float() * held.scale[:, None] - merged
    assert float(gap.norm() / merged.norm()) < 0.09 and held.weight.data_ptr() == place


def test_a_frozen_model_in_8_bits_samples_from_its_only_weights(make_llama: Make) -> None:
    model = smallest(make_llama)
    own = model.get_parameter("model.layers.0.mlp.up_proj.weight").detach().clone()
    narrow_projections(model)
    held = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert held.element_size() == 1 and not held.requires_grad
    engine = narrow_engine(model)
    layer = engine.runner.driver.layers[0]
    assert layer.gate_up.joined.weight[len(held) :].data_ptr() == held.data_ptr(), "no copy"
    scale = model.get_parameter("model.layers.0.mlp.up_proj.scale")
    torch.testing.assert_close(held.float() * scale[:, None].float(), own.float(), rtol=0.07, atol=1e-3)
    assert_near(engine, model)


def test_every_step_writes_its_logits_to_one_place(make_llama: Make) -> None:
    model = small(make_llama)
    settings = EngineSettings(page_size=4, kernels=True, check=False, max_running=5, kv_bytes=1 << 20)
    engine = Engine(model, eos_ids=set(), settings=settings)
    runner = engine.runner
    runner.logits = runner._logits_of(5)  # as if steps were captured
    assert len(runner.logits) == 16
    with torch.inference_mode(), warnings.catch_warnings(action="error", category=UserWarning):
        places = {runner._decode_logits(rows, False)[0].data_ptr() for rows in (1, 2, 8)}
    assert places == {runner.logits.data_ptr()}
    seqs = [engine.submit([5, 6, 7, 3 + i], Rules(max_tokens=5, temperature=0, top_logprobs=2))[0] for i in range(3)]
    engine.run_until_done()
    for seq in seqs:
        assert seq.ids == greedy(model, seq.ids[:4], 5)
        assert [top[0][0] for top in seq.tops] == seq.sampled


def test_heads_whose_width_is_not_a_power_of_two_are_supported(make_llama: Make) -> None:
    model = small(make_llama, head_dim=24)
    engine = Engine(
        model, eos_ids=set(), settings=EngineSettings(page_size=4, kernels=True, max_running=4, kv_bytes=1 << 20)
    )
    assert type(engine.runner.driver).__name__ == "FusedDriver"
    [seq] = engine.submit([5, 6, 7, 8, 9], Rules(max_tokens=4, temperature=0))
    engine.run_until_done()
    assert seq.ids == greedy(model, [5, 6, 7, 8, 9], 4)


@pytest.mark.parametrize("weights", ["model", "fp8"])
def test_kernels_compiled_ahead_run_and_change_no_other_state(
    make_llama: Make, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    if DEVICE.type == "cpu":  # the interpreter is slow for many rows
        monkeypatch.setattr("upshot.engine.cuda.warm.BUCKETS", [1, 2])
        monkeypatch.setattr(fp8, "MOST_TILED", 2)
        monkeypatch.setattr(fp8, "MOST_UNSCALED", 4)
    settings = EngineSettings(page_size=16, kernels=True, max_running=4, kv_bytes=1 << 20, weights=weights)
    runner = Engine(smallest(make_llama), eos_ids=set(), settings=settings).runner
    state = [runner.slots.tokens, runner.slots.place, runner.cache.table, runner.cache.k[:, 1:], runner.cache.v[:, 1:]]
    before = [x.clone() for x in state]
    common, fused = _common(runner, runner.driver), _fused(runner, runner.driver)
    with torch.inference_mode():
        for task in [*common[0], *common[1], *fused[0], *fused[1]]:
            task()
    assert all(torch.equal(x, y) for x, y in zip(state, before, strict=True))


def test_compiling_ahead_does_not_read_the_plan_of_a_concurrent_step(
    make_llama: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan names the rows of its step. The compiled kernel has one row and would write past the plan's end."""
    settings = EngineSettings(page_size=4, kernels=True, max_running=4, kv_bytes=1 << 20)
    engine = Engine(small(make_llama), eos_ids=set(), settings=settings)
    tasks = [task for some in _common(engine.runner, engine.runner.driver) for task in some]
    seqs = engine.submit([3 + i % 50 for i in range(40)], Rules(max_tokens=4), n=4)
    while not (engine.runner.batch.launches and all(seq.sampled for seq in seqs)):
        engine.step()
    plans: list[DecodePlan] = []
    monkeypatch.setattr("upshot.engine.cuda.warm.decode_attention", lambda *args: plans.append(args[7]))
    with torch.inference_mode():
        for task in tasks:
            task()
    assert engine.runner.batch._narrow.any(), "a step with a plan"
    assert len(plans) >= 2
    assert not any(table.any() for plan in plans for table in (plan.narrow, plan.wide, plan.rows) if table is not None)


def test_if_a_kernel_does_not_compile_for_a_shape_the_slower_driver_is_used(
    make_llama: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> torch.Tensor:
        raise TritonError("no such tile")

    monkeypatch.setattr("upshot.engine.cuda.steps.rotate_store", refuse)
    with pytest.warns(UserWarning, match="FusedDriver.*no such tile"):
        engine = Engine(
            small(make_llama), eos_ids=set(), settings=EngineSettings(page_size=4, kernels=True, max_running=4)
        )
    assert type(engine.runner.driver).__name__ == "BlockDriver"


@pytest.mark.parametrize("exact", [False, True])
def test_given_ids_are_scored_beside_sampled_ones_as_by_a_plain_forward(make_llama: Make, exact: bool) -> None:
    model = small(make_llama)
    sizes = {"page_size": 4, "max_running": 8, "kv_bytes": 1 << 20, "chunk_tokens": 16}
    engine = Engine(model, eos_ids=set(), settings=EngineSettings(kernels=True, check=exact, exact=exact, **sizes))
    prompt = [3 + (7 * i) % 60 for i in range(13)]
    [sampled] = engine.submit(prompt, Rules(max_tokens=3, temperature=0))
    scored = [engine.score(prompt, [5 + i] * (9 + 8 * i), top=2 * i) for i in range(3)]
    aborted = engine.score(prompt, [7] * 40)
    for _ in range(3):
        engine.step()
    engine.abort(aborted)
    engine.run_until_done()
    assert sampled.ids == greedy(model, prompt, 3)
    assert [s.cached for s in scored] == [12] * 3 and engine.pool.held == 0
    for seq in scored:
        expected = plain_logprobs(model, seq.ids, len(prompt))
        torch.testing.assert_close(torch.tensor(seq.logprobs), expected, atol=2e-4, rtol=1e-3)
    assert [len(top) for top in scored[2].tops] == [4] * 25 and scored[0].tops == []


def test_models_that_take_turns_in_one_place_keep_captured_steps_and_outputs(make_llama: Make) -> None:
    prompt = [5, 6, 7, 8, 9]
    models = {name: small(make_llama, initializer_range=spread) for name, spread in (("a", 0.2), ("b", 0.3))}
    said = {name: greedy(model, prompt, 4) for name, model in models.items()}
    layout = lay_out(dict.fromkeys(models, 1 << 18), 1 << 18)
    assert layout is not None and layout.conflicts
    pool = ModelPool(layout, DEVICE)
    engines = {}
    for name, model in models.items():
        slot = pool.slots[name]
        slot.furnish(model)
        sizes = EngineSettings(
            page_size=4, kernels=True, check=False, max_running=4, kv_bytes=slot.kv_bytes, own_stream=True
        )
        slot.engine = engines[name] = Engine(model, eos_ids=set(), settings=sizes, swap_slot=slot)
        assert type(slot.engine.runner.driver).__name__ == "FusedDriver"
    captured: dict[str, list[object]] = {}
    for name in "abab":
        engine = engines[name]
        [seq] = engine.submit(prompt, Rules(max_tokens=4, temperature=0))
        engine.step()
        other = engines["b" if name == "a" else "a"]
        other.swap_slot.enter()  # type: ignore[union-attr]
        assert engine.parked and not engine.runner.cache.k.numel()
        engine.run_until_done()
        assert seq.ids == said[name]
        graphs = [*engine.runner.graphs.values(), *engine.runner.prompt_graphs.values()]
        assert all(graph in graphs for graph in captured.setdefault(name, graphs)), "none is captured again"
        assert bool(graphs) == engine.on_gpu


def test_no_step_is_captured_while_kernels_are_compiled_in_threads(make_llama: Make) -> None:
    """A thread's launch could arrive on a stream that takes part in the capture and would become part of the graph."""
    settings = EngineSettings(page_size=4, kernels=True, max_running=4, kv_bytes=1 << 20)
    runner = Engine(small(make_llama), eos_ids=set(), settings=settings).runner
    compiling: Future[None] = Future()
    COMPILING.add(compiling)
    try:
        assert runner._is_new((1,)) and runner._is_new((1,))
    finally:
        COMPILING.discard(compiling)
    assert not runner._is_new((1,)) and runner._is_new((2,))
