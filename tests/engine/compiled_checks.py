"""The GPU's runner and compiled steps, with Triton's interpreter: run by test_compiled.py in a process of its own."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.engine.runner_checks import greedy, small
from upshot.engine import tracing
from upshot.engine.compiled import CompiledDriver, Compiler
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.sequence import Rules

Make = Callable[..., LlamaForCausalLM]
PROMPTS = [[5, 6, 7, 8, 9], [9, 8, 7]]


def own_forward(model: torch.nn.Module) -> Engine:
    settings = EngineSettings(page_size=4, kernels=True, max_running=4, kv_bytes=1 << 20, lean=False)
    return Engine(model, eos_ids=set(), settings=settings)


def go_on(engine: Engine, n: int) -> list[list[int]]:
    seqs = [engine.submit(p, Rules(max_tokens=n, temperature=0))[0] for p in PROMPTS]
    engine.run_until_done()
    return [s.ids for s in seqs]


def hand_over(engine: Engine, run: Any) -> Compiler:
    """As if the compiling process had left `run`."""
    compiler: Compiler = engine.runner.compiler
    compiler.start = lambda: None  # type: ignore[method-assign]
    from upshot.engine.compiled import structure

    compiler._structure, compiler._run, compiler.state = structure(compiler.driver.lm), run, "loaded"
    return compiler


def graph_of(model: torch.nn.Module) -> Any:
    return tracing.trace(pickle.loads(tracing.without_weights(model)).eval(), torch.device("cpu"))[0]


def test_eager_steps_serve_and_the_compiled_one_takes_over_with_the_live_weights(make_llama: Make) -> None:
    model = small(make_llama)
    engine = own_forward(model)
    graph, calls = graph_of(model), []

    def run(*args: torch.Tensor) -> Any:
        calls.append(len(args[0]))
        return graph(*args)

    seqs = [engine.submit(p, Rules(max_tokens=7, temperature=0))[0] for p in PROMPTS]
    for _ in range(4):
        engine.step()
    assert not calls and engine.stats()["compile_pending"] == 0
    hand_over(engine, run)
    assert engine.stats()["compile_pending"] == 1
    engine.run_until_done()
    assert isinstance(engine.runner.driver, CompiledDriver) and calls[0] == 4 and set(calls[1:]) == {2}
    assert [s.ids for s in seqs] == [greedy(model, p, 7) for p in PROMPTS]
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    engine.weights_changed()
    before = len(calls)
    assert go_on(engine, 4) == [greedy(model, p, 4) for p in PROMPTS] and len(calls) > before
    [alone] = engine.submit(PROMPTS[0], Rules(max_tokens=4, temperature=0))
    engine.run_until_done()
    assert alone.ids == greedy(model, PROMPTS[0], 4) and calls[-1] == 2  # one row runs as two


def test_a_compiled_step_that_computes_something_else_is_refused(make_llama: Make) -> None:
    model = small(make_llama)
    engine = own_forward(model)
    graph = graph_of(model)
    hand_over(engine, lambda *args: (graph(*args)[0] + 1.0,))
    with pytest.warns(UserWarning, match="stay uncompiled: the compiled step is not the model's: logits differ"):
        assert go_on(engine, 4) == [greedy(model, p, 4) for p in PROMPTS]
    assert type(engine.runner.driver).__name__ == "ModuleDriver" and engine.stats()["compile_pending"] == 0


def test_a_compiled_step_that_cannot_run_is_refused(make_llama: Make) -> None:
    model = small(make_llama)
    engine = own_forward(model)

    def run(*args: torch.Tensor) -> Any:
        raise RuntimeError("no kernel image")

    hand_over(engine, run)
    with pytest.warns(UserWarning, match="no kernel image"):
        assert go_on(engine, 3) == [greedy(model, p, 3) for p in PROMPTS]


def test_the_fast_path_has_nothing_to_compile(make_llama: Make) -> None:
    settings = EngineSettings(page_size=4, kernels=True, max_running=4, kv_bytes=1 << 20)
    engine = Engine(small(make_llama), eos_ids=set(), settings=settings)
    assert engine.runner.compiler is None and "compile_pending" not in engine.stats()


def test_other_modules_mean_another_trace(make_llama: Make) -> None:
    model = small(make_llama)
    engine = own_forward(model)
    hand_over(engine, graph_of(model))
    go_on(engine, 2)
    assert isinstance(engine.runner.driver, CompiledDriver)
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()
    engine.weights_changed()
    assert type(engine.runner.driver).__name__ == "ModuleDriver" and engine.runner.compiler.state == "waiting"
    assert go_on(engine, 3) == [greedy(model, p, 3) for p in PROMPTS]


def test_inductor_in_another_process(make_llama: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = small(make_llama)
    engine = own_forward(model)
    assert engine.runner.compiler.wait(), engine.runner.compiler.reason
    assert go_on(engine, 5) == [greedy(model, p, 5) for p in PROMPTS]
    assert isinstance(engine.runner.driver, CompiledDriver) and not engine.runner.compiler.cached
    second = own_forward(model)  # finds it on disk
    assert second.runner.compiler.wait() and second.runner.compiler.cached
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    second.weights_changed()
    assert go_on(second, 5) == [greedy(model, p, 5) for p in PROMPTS]
    assert isinstance(second.runner.driver, CompiledDriver)
