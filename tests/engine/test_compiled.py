"""Compiled decode steps: the traced graph is the model's forward, for any number of rows and on live weights.

Triton's interpreter is chosen when Triton is first imported: the runner's part (compiled_checks.py) has a process.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_families import FAMILIES, build
from upshot.engine import compiled, tracing
from upshot.engine.compiled import CompiledDriver, Compiler, key_of
from upshot.engine.driver import ModuleDriver, causal_lm, shape_of
from upshot.engine.engine import EngineSettings
from upshot.engine.probe import disagreement

CPU = torch.device("cpu")


class MixingStep:
    """Attention without pages: a fixed mixture that every argument has a part in, and a record of the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, float, int, float]] = []

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:  # fmt: skip
        self.calls.append((layer, scale, window, softcap))
        group = q.shape[1] // k.shape[1]
        return q * scale + k.repeat_interleave(group, 1) * 0.5 + v.repeat_interleave(group, 1)


def stand_in(model: torch.nn.Module) -> torch.nn.Module:
    """The model as the compiling process gets it."""
    copy: torch.nn.Module = pickle.loads(tracing.without_weights(causal_lm(model)))
    return copy.eval()


def traced_driver(model: torch.nn.Module) -> CompiledDriver:
    """A driver that runs the graph as traced, without a compiler behind it."""
    graph, _, env = tracing.trace(stand_in(model), CPU)
    assert tracing.assumptions(env) == []
    return CompiledDriver(ModuleDriver(model, shape_of(model)), graph)


def assert_same_logits(driver: CompiledDriver, rows: int) -> None:
    ids, positions = (5 * torch.arange(rows) + 3) % 90, torch.arange(rows) * 7
    with torch.inference_mode():
        ours, theirs = MixingStep(), MixingStep()
        got = driver.logits(ids, positions, ours, None)
        expected = driver.inner.logits(ids, positions, theirs, None)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    assert ours.calls == theirs.calls and len(ours.calls) == driver.shape.layers


def shift(model: torch.nn.Module) -> None:
    """What an optimizer does: other values, in place."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)


@pytest.mark.parametrize(("family", "over"), FAMILIES, ids=[f for f, _ in FAMILIES])
def test_one_graph_serves_all_numbers_of_rows_and_reads_the_live_weights(family: str, over: dict[str, Any]) -> None:
    model = build(family, over)
    driver = traced_driver(model)
    assert_same_logits(driver, 2)
    shift(model)
    assert_same_logits(driver, 37)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_are_in_the_graph_and_turning_them_off_is_noticed(make_llama: Callable[..., torch.nn.Module]) -> None:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(make_llama(), lora)
    model.train()
    driver = traced_driver(model)
    assert_same_logits(driver, 5)
    shift(model)
    assert_same_logits(driver, 8)
    assert not driver.stale()
    with model.disable_adapter():
        assert driver.stale()


def test_prompts_and_single_rows_go_through_the_model_itself(make_llama: Callable[..., torch.nn.Module]) -> None:
    model = make_llama()

    def never(*args: torch.Tensor) -> tuple[torch.Tensor]:
        raise AssertionError("the compiled step was called")

    driver = CompiledDriver(ModuleDriver(model, shape_of(model)), never)
    with torch.inference_mode():
        driver.logits(torch.tensor([5]), torch.tensor([0]), MixingStep(), None)
        driver.logits(torch.tensor([5, 6]), torch.tensor([0, 1]), MixingStep(), torch.tensor([1]))
    # Decoding in it equals the model's own forward, page by page (one row at a time is the uncompiled way).
    assert disagreement(model, driver) is None


def test_a_stand_in_has_the_modules_and_none_of_the_weights() -> None:
    model = build("Gemma2", {"sliding_window": 12, "query_pre_attn_scalar": 16})
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert len(tracing.without_weights(model)) < size / 4
    copy = stand_in(model)
    assert {p.device.type for p in copy.parameters()} == {"meta"}
    assert [n for n, _ in copy.named_parameters()] == [n for n, _ in model.named_parameters()]  # tied ones once


def test_the_key_names_the_computation_and_not_the_weights() -> None:
    model = build("Llama", {})
    key = key_of(model, CPU)
    shift(model)
    model.train()
    model.config._attn_implementation = "eager"
    model.config._name_or_path = "elsewhere"
    assert key_of(model, CPU) == key
    assert key_of(build("Llama", {"rms_norm_eps": 1e-3}), CPU) != key
    assert key_of(build("Llama", {"num_hidden_layers": 3}), CPU) != key
    assert key_of(build("Qwen2", {}), CPU) != key
    code = (
        "from tests.engine.test_families import build; from upshot.engine.compiled import key_of; import torch;"
        "print(key_of(build('Llama', {}), torch.device('cpu')))"
    )
    env = {
        **os.environ,
        "PYTHONHASHSEED": "5",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }
    other = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert other.stdout.split()[-1] == key


def test_nothing_starts_before_the_run_has_shown_that_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama", {})
    compiler = Compiler(ModuleDriver(model, shape_of(model)), after=3)
    started: list[bool] = []
    monkeypatch.setattr(compiler, "start", lambda: started.append(True))
    for _ in range(3):
        assert compiler.ready() is None
    assert not started and not compiler.pending
    compiler.ready()
    assert started


def test_a_failing_compiler_is_said_once_and_nothing_else_happens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = build("Llama", {})
    compiler = Compiler(ModuleDriver(model, shape_of(model)), after=0)

    def broken(model: bytes, artefact: Path) -> dict[str, float]:
        raise RuntimeError("the compiling process failed: no compiler here")

    monkeypatch.setattr(compiler, "_compile", broken)
    assert not compiler.wait(60)
    with pytest.warns(UserWarning, match="stay uncompiled.*no compiler here"):
        assert compiler.ready() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.ready() is None
    assert compiler.state == "failed" and not list(tmp_path.rglob("*.bin"))


def test_a_model_that_cannot_be_handed_over_stays_eager() -> None:
    model = build("Llama", {})
    model.note = lambda: None  # type: ignore[assignment]
    compiler = Compiler(ModuleDriver(model, shape_of(model)))
    with pytest.warns(UserWarning, match="cannot be handed to another process"):
        compiler.start()
    assert compiler.state == "failed" and compiler.ready() is None


def test_the_last_used_files_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "KEEP", 2)
    for age, name in enumerate("abc"):
        path = tmp_path / f"{name}.bin"
        path.write_bytes(b"")
        os.utime(path, (1000 - age, 1000 - age))
    compiled._prune(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "b.bin"]


def test_the_default_compiles() -> None:
    assert EngineSettings().compile


def run_checks(name: str, timeout_s: float) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    checks = str(Path(__file__).with_name("compiled_checks.py"))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        checks,
        "-k",
        name,
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_runner_changes_over_and_back() -> None:
    pytest.importorskip("triton")
    run_checks("not inductor", 280)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor's CPU backend needs g++")
def test_inductor_compiles_in_another_process_and_the_runner_uses_it() -> None:
    pytest.importorskip("triton")
    run_checks("inductor", 900)


def test_a_file_that_cannot_be_loaded_is_removed_so_that_the_next_run_compiles_it(tmp_path: Path) -> None:
    artefact = tmp_path / "step.bin"
    artefact.write_bytes(b"half a file")
    with pytest.raises(Exception):  # noqa: B017 - whatever PyTorch makes of it
        compiled._load_or_drop(artefact, torch.device("cpu"))
    assert not artefact.exists()
