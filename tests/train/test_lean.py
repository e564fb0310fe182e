"""The learner's lean forward: hidden states and every gradient are transformers' own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from upshot.train.lean import LeanForward

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 3},
    "Qwen2": {},
    "Qwen3": {},
    "SmolLM3": {"no_rope_layers": [1, 0, 1]},
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def build(family: str, heads: int = 4, kv_heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=53, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=64, initializer_range=0.2, pad_token_id=0,
        eos_token_id=1, bos_token_id=2, attn_implementation="eager", **FAMILIES[family],
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases are no ones and zeros after training
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def with_lora(model: Any, targets: list[str] = ALL, **over: Any) -> Any:
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM", **over)
    model = peft.get_peft_model(model, config)
    return stirred(model)


def stirred(model: Any) -> Any:
    """Adapters that do something: as made, their second matrix is zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    return model.eval()


def attention(lengths: list[int]) -> Callable[..., Tensor]:
    """Causal attention within each of the sequences that lie one after the other."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        at = torch.arange(len(q), device=q.device)
        which = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)], device=q.device)
        seen = (which[:, None] == which[None]) & (at[:, None] >= at[None])
        if window:
            seen &= at[:, None] - at[None] < window
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def flat(lengths: list[int], device: Any = "cpu") -> tuple[Tensor, Tensor]:
    rng = random.Random(0)
    ids = torch.tensor([rng.randrange(3, 53) for _ in range(sum(lengths))])
    return ids.to(device), torch.cat([torch.arange(n) for n in lengths]).to(device)


def own_hidden(model: Any, ids: Tensor, lengths: list[int]) -> Tensor:
    """What transformers' forward gives the head, sequence by sequence."""
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
    """Relative to the tensor's largest value."""
    assert a.shape == b.shape and a.dtype == b.dtype, what
    a, b = a.detach(), b.detach()
    worst = float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-2))
    assert worst < tolerance, f"{what}: off by {worst:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@settings(max_examples=4, deadline=None)
@given(
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    dim=st.sampled_from([4, 8, 12]),
    more=st.lists(st.integers(1, 9), max_size=3),
    checkpoint=st.sampled_from(["none", "block", 2]),
)
def test_hidden_states_and_every_gradient_are_transformers_own(
    family: str, lora: bool, heads: tuple[int, int], dim: int, more: list[int], checkpoint: Any
) -> None:
    model = build(family, *heads, dim)
    compare(with_lora(model) if lora else model, [7, *more], checkpoint=checkpoint)
