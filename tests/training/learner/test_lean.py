"""The learner's lean forward: hidden states and all gradients match transformers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from upshot.engine.kernels import plain
from upshot.engine.kernels.plain import AttentionOptions
from upshot.engine.llama.linear import side_by_side
from upshot.training.learner.forward.lean import LeanForward

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 3},
    "Qwen2": {},
    "Qwen3": {},
    "SmolLM3": {"no_rope_layers": [0, 1, 1]},
    "Gemma": {},
    "Gemma2": {"sliding_window": 3, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "Gemma3": {"sliding_window": 3, "query_pre_attn_scalar": 16},
    "Phi3": {"partial_rotary_factor": 0.5},
    "Granite": {
        "attention_bias": True,
        "residual_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
    },
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def build(family: str, heads: int = 4, kv_heads: int = 2, dim: int = 8, layers: int = 3) -> Any:
    mixed = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"][:layers]}
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config"))(
        vocab_size=53, hidden_size=24, intermediate_size=40, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=64, initializer_range=0.2, pad_token_id=0,
        eos_token_id=1, bos_token_id=2, attn_implementation="eager", **FAMILIES[family],
        **(mixed if family == "Gemma3" else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases are not ones and zeros after training
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def with_lora(model: Any, targets: list[str] = ALL, **over: Any) -> Any:
    if hasattr(model.model.layers[0].self_attn, "qkv_proj"):
        targets = [{"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}.get(name, name) for name in targets]
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM", **over)
    model = peft.get_peft_model(model, config)
    return stirred(model)


def stirred(model: Any) -> Any:
    """Adapters with an effect: when created, their second matrix is zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    return model.eval()


def attention(lengths: list[int]) -> Callable[..., Tensor]:
    """Causal attention within each of the concatenated sequences."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        scale, window, softcap, *_ = options
        at = torch.arange(len(q), device=q.device)
        which = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)], device=q.device)
        seen = (which[:, None] == which[None]) & (at[:, None] >= at[None])
        if window:
            seen &= at[:, None] - at[None] < window
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
        if softcap:
            back = torch.where(seen, at[:, None] - at, -1)[None]
            return plain.attention(*heads, back, options._replace(window=0))[0].transpose(0, 1)
        out = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


class Direct(torch.autograd.Function):
    """Attention as a single autograd function, like flash attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, inner: Callable[..., Tensor], scale: float) -> Tensor:
        with torch.enable_grad():
            ctx.given = [x.detach().requires_grad_() for x in (q, k, v)]
            ctx.out = inner(0, *ctx.given, AttentionOptions(scale))
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        return *torch.autograd.grad(ctx.out, ctx.given, d), None, None


def flat(lengths: list[int], device: Any = "cpu") -> tuple[Tensor, Tensor]:
    rng = random.Random(0)
    ids = torch.tensor([rng.randrange(3, 53) for _ in range(sum(lengths))])
    return ids.to(device), torch.cat([torch.arange(n) for n in lengths]).to(device)


def own_hidden(model: Any, ids: Tensor, lengths: list[int]) -> Tensor:
    """The hidden states that transformers' forward gives the head, sequence by sequence."""
    lm = model.get_base_model() if hasattr(model, "peft_config") else model
    return torch.cat([lm.model(input_ids=part[None], use_cache=False)[0][0] for part in ids.split(lengths)])


def gradients(model: Any, hidden: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5)).to(hidden)
    (hidden * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def compare(model: Any, lengths: list[int], tolerance: float = 1e-4, **over: Any) -> None:
    ids, positions = flat(lengths, model.device)
    expected = own_hidden(model, ids, lengths)
    own = gradients(model, expected)
    hidden = LeanForward(model, **over).hidden(ids, positions, attention(lengths))
    assert_near(hidden, expected, tolerance, "hidden")
    found = gradients(model, hidden)
    assert found.keys() == own.keys() and own
    for name, expected_gradient in own.items():
        assert_near(found[name], expected_gradient, tolerance, name)


def assert_near(a: Tensor, b: Tensor, tolerance: float, what: str) -> None:
    """Equal relative to the tensor's largest value."""
    assert a.shape == b.shape and a.dtype == b.dtype, what
    a, b = a.detach(), b.detach()
    worst = float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-2))
    assert worst < tolerance, f"{what}: off by {worst:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@settings(max_examples=2, deadline=None)
@given(
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    dim=st.sampled_from([4, 8, 12]),
    more=st.lists(st.integers(1, 9), max_size=3),
    checkpoint=st.sampled_from(["none", "mlp", "block"]),
    again=st.sampled_from([None, 1, 2]),
)
def test_hidden_states_and_all_gradients_match_transformers(
    family: str, lora: bool, heads: tuple[int, int], dim: int, more: list[int], checkpoint: Any, again: int | None
) -> None:
    model = build(family, *heads, dim)
    compare(with_lora(model) if lora else model, [7, *more], checkpoint=checkpoint, layers=again)


@pytest.mark.parametrize("checkpoint", ["none", "mlp", "block"])
def test_attention_that_is_one_function_is_differentiated_directly(checkpoint: Any) -> None:
    model, lengths = build("Llama"), [6, 3]
    ids, positions = flat(lengths)
    inner = attention(lengths)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        return Direct.apply(q, k, v, inner, options.scale)  # type: ignore[no-any-return]

    def swapped(layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        return attend(layer, q * 1.0, k, v, options)  # not the function's own arguments

    expected = gradients(model, own_hidden(model, ids, lengths))
    for way in (attend, swapped):
        found = gradients(model, LeanForward(model, checkpoint).hidden(ids, positions, way))
        for name, gradient in expected.items():
            assert_near(found[name], gradient, 1e-4, name)


def test_several_forwards_may_be_pending_and_each_runs_backward_once() -> None:
    model = with_lora(build("Llama"))
    lean = LeanForward(model, 2)
    ids, positions = flat([6, 3])
    alone = gradients(model, lean.hidden(ids, positions, attention([6, 3])))
    first = lean.hidden(ids, positions, attention([6, 3]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(2.0)  # adapters are cast for each forward: the first keeps its own copy
    second = lean.hidden(ids, positions, attention([6, 3]))
    for name, gradient in gradients(model, first).items():
        assert torch.equal(gradient, alone[name]), name
    gradients(model, second)
    with pytest.raises(RuntimeError, match="twice"):
        second.sum().backward()


def off(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The distance of all gradients from the exact ones, relative to their size."""
    apart = sum(float((found[name].float() - value).square().sum()) for name, value in truth.items())
    return float((apart / sum(float(value.square().sum()) for value in truth.values())) ** 0.5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_bfloat16_is_as_accurate_as_transformers(family: str, lora: bool) -> None:
    model, lengths = build(family), [9, 4, 6]
    model = with_lora(model) if lora else model
    ids, positions = flat(lengths)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # adapters are float32 beside a bfloat16 model
            if "lora" not in name:
                parameter.copy_(parameter.bfloat16())
    true_hidden = own_hidden(model, ids, lengths)
    truth = gradients(model, true_hidden)
    for name, parameter in model.named_parameters():
        if "lora" not in name:
            parameter.data = parameter.data.bfloat16()
    own = own_hidden(model, ids, lengths)
    lean = LeanForward(model, "block").hidden(ids, positions, attention(lengths))
    assert lean.dtype == torch.bfloat16
    apart = [float((x - true_hidden).detach().norm() / true_hidden.detach().norm()) for x in (lean, own)]
    assert apart[0] < 1.3 * apart[1] + 1e-3
    assert off(gradients(model, lean), truth) < 2 * off(gradients(model, own), truth) + 1e-3


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["down_proj"], ["k_proj", "o_proj", "up_proj"]])
def test_adapters_on_some_projections_match_transformers(targets: list[str]) -> None:
    compare(with_lora(build("Qwen2"), targets), [5, 3])


def test_several_adapters_and_rank_stabilised_ones_have_their_own_scales() -> None:
    model = with_lora(build("Llama"), ["q_proj", "k_proj", "down_proj"], use_rslora=True)
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=7, target_modules=["k_proj", "gate_proj"]))
    model.base_model.set_adapter(["default", "second"])
    compare(stirred(model), [5, 3])


def test_disabled_or_merged_adapters_are_not_applied() -> None:
    model = with_lora(build("Llama"))
    ids, positions = flat([6, 2])
    lean = LeanForward(model)

    def found() -> Tensor:
        with torch.no_grad():
            return lean.hidden(ids, positions, attention([6, 2]))

    adapted = found()
    with model.disable_adapter():
        off = found()
        assert_near(off, own_hidden(model, ids, [6, 2]), 1e-5, "off")
    model.merge_adapter()
    assert_near(found(), adapted, 1e-4, "merged")
    with model.disable_adapter():
        assert_near(found(), off, 1e-4, "merged, then off")
    assert float((off - adapted).abs().max()) > 0.1


def test_unsupported_adapters_are_computed_by_their_module() -> None:
    compare(with_lora(build("Llama"), ["q_proj", "up_proj", "o_proj"], use_dora=True), [5, 3], checkpoint="block")
    compare(with_lora(build("Qwen3"), ["q_proj", "up_proj", "down_proj"], lora_bias=True), [5, 3])


@pytest.mark.parametrize("checkpoint", ["none", "mlp", "block"])
def test_dropout_of_adapters_is_drawn_in_training(checkpoint: Any) -> None:
    model = with_lora(build("Llama"), lora_dropout=0.5).train()
    ids, positions = flat([7])
    torch.manual_seed(1)
    expected = own_hidden(model, ids, [7])
    own = gradients(model, expected)
    torch.manual_seed(1)  # one sequence: the same modules draw the same numbers in the same order
    hidden = LeanForward(model, checkpoint).hidden(ids, positions, attention([7]))
    assert_near(hidden, expected, 1e-4, "hidden")
    for name, gradient in gradients(model, hidden).items():
        assert_near(gradient, own[name], 1e-4, name)
    compare(model.eval(), [7])


def test_only_trainable_weights_get_a_gradient() -> None:
    model = build("Qwen3")
    kept = ("layers.1.self_attn.k_proj", "layers.1.self_attn.q_norm", "layers.0.mlp.down_proj", "layers.2.input")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in kept))
    compare(model, [5, 3])
    compare(model, [5, 3], checkpoint="block")


def test_weights_with_replaced_storage_are_read_from_it() -> None:
    model = build("Qwen2")
    lean = LeanForward(model)
    assert side_by_side([p.weight for p in lean.layers[0].qkv.modules]) is not None
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 1.1
    assert side_by_side([p.weight for p in lean.layers[0].qkv.modules]) is None
    ids, positions = flat([5, 3])
    hidden = lean.hidden(ids, positions, attention([5, 3]))
    expected = own_hidden(model, ids, [5, 3])
    assert_near(hidden, expected, 1e-4, "hidden")
    found, own = gradients(model, hidden), gradients(model, expected)
    assert all((found[name] - own[name]).abs().max() < 1e-3 for name in own)


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def kept_values(model: Any, checkpoint: Any = "none", again: int | None = None) -> int:
    """Values per token that the forward keeps for the backward pass, each tensor counted once."""
    ids, positions = torch.randint(3, 53, (64,)), torch.arange(64)
    hidden = LeanForward(model, checkpoint, again).hidden(ids, positions, attention([64]))
    node: Any = hidden.grad_fn
    return sum({(x.data_ptr(), x.numel()): x.numel() for x in tensors(node.activations)}.values()) // 64


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_layer_keeps_no_more_than_the_memory_plan_assumes(lora: bool) -> None:
    h, a, kv, m, rank = 24, 32, 16, 40, 7 * 3 if lora else 0
    adapted: Callable[[Any], Any] = with_lora if lora else lambda model: model
    two, three = (kept_values(adapted(build("Llama", layers=n))) for n in (2, 3))
    assert three - two == 2 * h + 2 * a + 2 * kv + 2 * m + rank
    two, three = (kept_values(adapted(build("Llama", layers=n)), "mlp") for n in (2, 3))
    assert three - two == 2 * h + 2 * a + 2 * kv + rank
    two, three = (kept_values(adapted(build("Llama", layers=n)), "block") for n in (2, 3))
    assert three - two == h
    none, one, two = (kept_values(adapted(build("Llama")), "mlp", again) for again in (0, 1, 2))
    assert none - one == one - two == 2 * m, "layer by layer"
