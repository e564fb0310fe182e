"""Every family on a GPU, eager and compiled: greedy ids and log-probabilities are those of the model's own forward.

pytest -q tests/engine/test_gpu.py        # minutes: all families compile side by side, in processes of their own
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import tiny_llama
from tests.engine.test_families import FAMILIES, build
from upshot.engine.compiled import CompiledDriver
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.sequence import Rules, Sequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(900),
]
LORA = "Llama with LoRA"
NAMES = [*(family for family, _ in FAMILIES), LORA]
PROMPTS = [[3 + (5 * i + j) % 90 for j in range(4 + 7 * i)] for i in range(4)]


def make(name: str, dtype: torch.dtype) -> torch.nn.Module:
    """A small model of the family on the GPU."""
    if name != LORA:
        return build(name, dict(FAMILIES)[name]).to("cuda", dtype)
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(tiny_llama(vocab_size=97), lora).to("cuda", dtype).train()


def engine_on(model: torch.nn.Module, **over: Any) -> Engine:
    """An engine with a small cache."""
    settings = {"kv_bytes": 64 << 20, "max_running": 64, "compile": False, **over}
    return Engine(model, eos_ids=set(), settings=EngineSettings(**settings))


def shift(model: torch.nn.Module) -> None:
    """What an optimizer does: other values, in place."""
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


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, torch.dtype], Engine]]:
    """An engine a family and dtype, whose steps compile side by side from the first test on."""
    home: Path = tmp_path_factory.mktemp("cache")
    engines: dict[tuple[str, torch.dtype], Engine] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        for name in NAMES:
            if name == LORA and importlib.util.find_spec("peft") is None:
                continue
            for dtype in (torch.float32, torch.bfloat16):
                engine = engine_on(make(name, dtype), compile=True, lean=name == LORA)
                engine.runner.compiler.start()
                engines[name, dtype] = engine
        yield engines
        for engine in engines.values():
            engine.runner.compiler.close()


@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids_are_the_models_own_and_follow_its_weights(name: str) -> None:
    model = make(name, torch.float32)
    engine = engine_on(model)
    assert_greedy(model, generate(engine))
    shift(model)
    engine.weights_changed()
    assert_greedy(model, generate(engine))


@pytest.mark.parametrize("name", NAMES)
def test_sampled_logprobs_in_bfloat16_are_near_the_models_own(name: str) -> None:
    model = make(name, torch.bfloat16)
    assert_close(model, generate(engine_on(model), n=5, temperature=1.0), mean=0.15)


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_step_takes_over_and_follows_the_weights(
    name: str, compiling: dict[tuple[str, torch.dtype], Engine]
) -> None:
    if (name, torch.float32) not in compiling:
        pytest.skip("peft is not installed")
    engine = compiling[name, torch.float32]
    assert_greedy(engine.model, generate(engine))  # eager steps, while the compiler is at work
    assert engine.runner.compiler.wait(), engine.runner.compiler.reason
    seqs = generate(engine)
    assert isinstance(engine.runner.driver, CompiledDriver) and engine.stats()["compiled_buckets"] >= 1
    assert_greedy(engine.model, seqs)
    shift(engine.model)
    engine.weights_changed()
    assert_greedy(engine.model, generate(engine))
    assert_greedy(engine.model, generate(engine, n=5))  # other numbers of rows, shared prefixes
    [alone] = engine.submit(PROMPTS[0], Rules(max_tokens=8, temperature=0))
    engine.run_until_done()
    assert_greedy(engine.model, [alone])
    assert isinstance(engine.runner.driver, CompiledDriver)


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_step_in_bfloat16_is_near_the_models_own(
    name: str, compiling: dict[tuple[str, torch.dtype], Engine]
) -> None:
    if (name, torch.bfloat16) not in compiling:
        pytest.skip("peft is not installed")
    engine = compiling[name, torch.bfloat16]
    assert engine.runner.compiler.wait(), engine.runner.compiler.reason
    seqs = generate(engine, n=5, temperature=1.0)
    assert isinstance(engine.runner.driver, CompiledDriver)
    assert_close(engine.model, seqs, mean=0.15)


def test_a_compiled_step_is_found_on_disk(compiling: dict[tuple[str, torch.dtype], Engine]) -> None:
    assert compiling["Gemma2", torch.float32].runner.compiler.wait()
    engine = engine_on(make("Gemma2", torch.float32), compile=True)
    assert engine.runner.compiler.wait(60) and engine.runner.compiler.cached
    assert_greedy(engine.model, generate(engine))
    assert isinstance(engine.runner.driver, CompiledDriver)
