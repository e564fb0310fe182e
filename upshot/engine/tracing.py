"""A decode step as one graph, compiled by Inductor in a process of its own (`main`).

The process gets the model without its weights (a stand-in of the same modules), traces the model's own forward with
fake tensors for any number of rows from LEAST to MOST, and leaves one file. All weights are inputs of the graph,
nothing is folded or frozen: the compiled step computes with whatever the live parameters hold. Attention is one opaque
operator that asks the step under way. Not here: prompts, and adapters that come or go later.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import torch

from upshot.engine import attention
from upshot.engine.attention import driving

LEAST, MOST = 2, 1024
"""Rows of a compiled step. One row is a special case to a compiler (its size broadcasts)."""
HINT = 256
"""The number of rows kernels are tuned for."""
OPTIONS: dict[str, Any] = {"emulate_precision_casts": True, "shape_padding": False}
"""Inductor's: round where transformers rounds, so that sampler and learner agree; pad no product, for whether that pays
depends on the number of rows."""


# The cache is not among the arguments: each layer's call writes and reads its own part, inside the operator, and its
# result is always used, so no order or saving the compiler may choose can change what is read.
@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "upshot::attend",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, int layer, float scale, int window, float softcap) -> Tensor",
)
def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """Store and attend in the step under way."""
    return attention._active[-1].attend(layer, q, k, v, scale, window, softcap)


@attend.register_fake  # type: ignore[untyped-decorator]
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, scale: float, window: int, softcap: float
) -> torch.Tensor:
    return torch.empty_like(q)


class TracedStep:
    """Stands for the step while the forward is traced."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Put the operator into the graph; the kernel before it writes the rows in order."""
        return torch.ops.upshot.attend(
            q.contiguous(), k.contiguous(), v.contiguous(), layer, float(scale), int(window), float(softcap)
        )


# --- the model without its weights


def _weight(shape: list[int], stride: list[int], dtype: torch.dtype, parameter: bool) -> torch.Tensor:
    weight = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return torch.nn.Parameter(weight, requires_grad=False) if parameter else weight


class _Stripped(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            parts = list(obj.shape), list(obj.stride()), obj.dtype, isinstance(obj, torch.nn.Parameter)
            return _weight, parts
        return NotImplemented


def without_weights(lm: torch.nn.Module) -> bytes:
    """The model pickled with tensors that have a shape and no values."""
    file = io.BytesIO()
    _Stripped(file, protocol=5).dump(lm)
    return file.getvalue()


def inputs_of(lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Everything the graph takes besides ids and positions, by name."""
    return {**dict(lm.named_parameters()), **dict(lm.named_buffers())}


# --- graph


def trace(lm: torch.nn.Module, device: torch.device, hint: int = HINT) -> tuple[torch.fx.GraphModule, list[Any], Any]:
    """The decode step as a graph (ids, positions, *inputs) -> (logits,), its example inputs, its shape environment."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from upshot.engine.driver import ModuleDriver

    inner = ModuleDriver(lm, None)  # type: ignore[arg-type]
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    weights = inputs_of(lm)
    ids = _rows(mode, device, hint)
    with mode:
        positions = torch.empty_like(ids)
        examples = [torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=device) for w in weights.values()]

    def forward(ids: torch.Tensor, positions: torch.Tensor, *live: torch.Tensor) -> tuple[torch.Tensor]:
        call = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": None, "use_cache": False}
        with driving(inner.configs, inner.quiet, TracedStep()):
            out = torch.func.functional_call(lm, dict(zip(weights, live, strict=True)), (), call)
        return (out.logits[0],)

    # Some operators' C++ asks for sizes as numbers (and so fixes them); Python's versions of them do not.
    with torch.no_grad(), tracing(TracingContext(mode)), enable_python_dispatcher():
        graph = make_fx(forward)(ids, positions, *examples)
    output = next(iter(reversed(graph.graph.nodes)))
    for node in output.args[0]:
        node.meta["example_value"] = node.meta["val"]  # where Inductor looks for the shape environment
    return graph, [ids, positions, *examples], env


def _rows(mode: Any, device: torch.device, hint: int) -> torch.Tensor:
    """A fake tensor of LEAST to MOST ids."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext, StrictMinMaxConstraint
    from torch.utils._sympy.value_ranges import ValueRanges

    bounds = StrictMinMaxConstraint(vr=ValueRanges(LEAST, MOST), warn_only=False)
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC], constraint_sizes=[bounds])
    example = torch.empty(hint, dtype=torch.int64, device="meta")
    fake = mode.from_tensor(example, symbolic_context=context)
    with mode:
        return torch.empty_like(fake, device=device)


def assumptions(env: Any) -> list[str]:
    """What tracing or compiling took for granted about the number of rows and does not hold from LEAST to MOST."""
    if not env.var_to_range:
        return [f"rows = {HINT}"]
    broken = [f"{symbol} = {value}" for symbol, value in env.replacements.items()]
    for guard in env.guards:
        symbols = list(guard.expr.free_symbols)
        if any(not bool(guard.expr.xreplace(dict.fromkeys(symbols, _integer(n)))) for n in range(LEAST, MOST + 1)):
            broken.append(str(guard.expr))
    return broken


def _integer(n: int) -> Any:
    import sympy

    return sympy.Integer(n)


def compile_step(lm: torch.nn.Module, device: torch.device, path: Path) -> dict[str, Any]:
    """Compile the decode step into the file `path`; how long it took."""
    import torch._inductor

    began = time.perf_counter()
    lm.eval()
    graph, examples, env = trace(lm, device)
    traced = time.perf_counter()
    artefact = torch._inductor.standalone_compile(graph, examples, options={"config_patches": OPTIONS})
    broken = assumptions(env)
    if broken:
        raise RuntimeError(f"the compiled step would hold for some numbers of rows only ({'; '.join(broken)})")
    unfinished = path.with_suffix(f".{os.getpid()}")
    artefact.save(path=str(unfinished), format="binary")
    os.replace(unfinished, path)
    return {"trace_s": traced - began, "compile_s": time.perf_counter() - traced}


def _end_with_parent() -> None:
    """Leave when whoever asked is gone: its end of our standard input closes."""
    while os.read(0, 4096):  # not `sys.stdin`, whose lock a thread must not hold when the interpreter ends
        pass
    os._exit(1)


def main(request: str) -> None:
    """Compile what the request asks for."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(10)
    ask = pickle.loads(Path(request).read_bytes())
    device = torch.device(ask["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    took = compile_step(pickle.loads(ask["model"]), device, Path(ask["artefact"]))
    print(json.dumps(took))
