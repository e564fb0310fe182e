"""Families of transformers models: in every method, gradients match the model's own forward of each sequence.

Some are read packed; those whose layers keep a state of their own (convolutions, state spaces) are padded. A leak from
one sequence into the next would show in the short ones.
"""

from __future__ import annotations

import math
import random
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.tiny import shared_tokenizer
from upshot.config.recipe import TrainConfig
from upshot.core.errors import UserError
from upshot.engine.engine import Engine
from upshot.training.learner.batch import Datum, ForwardOutput, TrainBatch
from upshot.training.learner.forward.lean import Block, LeanForward
from upshot.training.learner.forward.lora_linear import Gradients, Product
from upshot.training.learner.forward.packed import PackedForward
from upshot.training.learner.forward.padded import Forward, PaddedForward
from upshot.training.learner.forward.select import forward_of, gradient_gap
from upshot.training.learner.learner import Learner
from upshot.training.loops.dpo import Dpo
from upshot.training.loops.sft import Sft
from upshot.training.objectives.objectives import Objective, PolicyGradient

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
OLD = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
"""GPT-2's names of the sizes."""
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
STATE = {"state_size": 4, "expand": 2, "conv_kernel": 4, "time_step_rank": 2, "n_groups": 1, "num_heads": 8}
MAMBA = {
    "mamba_d_ssm": 32, "mamba_n_heads": 8, "mamba_d_head": 4, "mamba_n_groups": 1, "mamba_d_state": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "shared_expert_intermediate_size": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
GEMMA = {"sliding_window": 7, "query_pre_attn_scalar": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "SmolLM3": {},
    "Mistral": {"sliding_window": 7},
    "Gemma2": {**GEMMA, "attn_implementation": "eager"},
    "Gemma3": GEMMA,
    "Olmo2": {},
    "Phi3": {},
    "Granite": {},
    "Cohere": {},
    "GPT2": OLD,
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "Bloom": OLD,
    "Qwen3Moe": MOE,
    "GptOss": MOE,
    # Those with a state other than keys and values.
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 24},
    "Mamba": STATE,
    "Mamba2": STATE | {"chunk_size": 8},
    "FalconH1": MAMBA,
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
    "GraniteMoeHybrid": MAMBA | MOE | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 8},
    "Qwen3Next": LINEAR | MOE,
    "RecurrentGemma": {"block_types": ["recurrent", "attention"], "lru_width": 16, "attention_window_size": 16},
    "Rwkv": {"attention_hidden_size": 16, "context_length": 64},
}
STATEFUL = list(FAMILIES)[list(FAMILIES).index("Lfm2") :]
PACKED = [name for name in FAMILIES if name not in (*STATEFUL, "Cohere", "Bloom", "GptOss")]
"""Features that packing supports: scaled logits, special attention, attention sinks."""


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A small model of a family, or a skip if this release of transformers lacks it."""
    kind = {"Gemma3": "Gemma3Text"}.get(family, family)
    lm = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    if not hasattr(transformers, lm):
        pytest.skip(f"this release of transformers has no {lm}")
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **FAMILIES[family]})
    torch.manual_seed(0)
    return getattr(transformers, lm)(config).to(dtype)


def chosen(module: Any) -> Forward:
    """The learner's forward, without its messages about slower ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return forward_of(module)


def data() -> list[Datum]:
    """Long and short sequences, in pairs of which some begin alike."""
    rng = random.Random(3)
    found = []
    for length in (37, 4, 2, 29, 3, 19, 21, 21):
        ids = [rng.randrange(3, 61) for _ in range(length)]
        found.append(Datum(ids, [0, *[1] * (length - 1)], *([rng.gauss(0, 1) for _ in ids] for _ in range(3))))
    found[-1].ids[:17] = found[-2].ids[:17]
    return found


def own_logprobs(module: Any, datum: Datum) -> Tensor:
    """The model's own log-probabilities of a sequence by itself."""
    ids = torch.tensor([datum.ids])
    logits = module(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def own_loss(found: list[Tensor], some: list[Datum], method: str, config: TrainConfig) -> Tensor:
    """The loss of a method, written a second time, from the log-probabilities of each sequence."""
    tokens = sum(len(datum.ids) - 1 for datum in some)
    columns = [{name: torch.tensor(getattr(d, name)[1:]) for name in ("old", "advantages", "reference")} for d in some]
    if method == "sft":
        return -torch.cat(found).sum() / tokens
    if method == "dpo":
        gained = [(own - column["reference"]).sum() for own, column in zip(found, columns, strict=True)]
        margins = torch.stack([a - b for a, b in zip(gained[::2], gained[1::2], strict=True)])
        return -torch.nn.functional.logsigmoid(config.dpo.beta * margins).mean()
    total = torch.zeros(())
    for own, column in zip(found, columns, strict=True):
        ratio = (own - column["old"]).exp()
        clipped = ratio.clamp(1 - config.clip.low, 1 + config.clip.high)
        total = total - torch.minimum(ratio * column["advantages"], clipped * column["advantages"]).sum()
    return total / tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_in_every_method_gradients_are_those_of_each_sequence_by_itself(family: str) -> None:
    module = build(family)
    config, units = TrainConfig(length_norm="token", token_budget=200), data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = Learner(module, shared_tokenizer(), config)
    assert isinstance(own.forward, PackedForward if family in PACKED else PaddedForward)
    objectives: dict[str, Objective] = {"sft": Sft(), "dpo": Dpo(config), "rl": PolicyGradient(config)}
    logprobs = [own_logprobs(module.eval(), datum) for datum in units]  # for all methods: no weight changes
    for datum, near in zip(units, logprobs, strict=True):  # near the policy, so that not every token is clipped
        datum.old = [0.0, *(near.detach() + 0.1 * torch.tensor(datum.old[1:])).tolist()]
    for method, objective in objectives.items():
        objective.dropout = False
        loss = own_loss(logprobs, units, method, config)
        loss.backward(retain_graph=True)
        expected = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        module.zero_grad()
        pairs = [units[i : i + 2] for i in range(0, len(units), 2)] if method == "dpo" else [[d] for d in units]
        logs = own.forward_backward(pairs, objective)
        assert logs[{"sft": "loss/nll", "dpo": "loss/dpo", "rl": "loss/policy"}[method]] == pytest.approx(
            float(loss), rel=1e-4, abs=1e-5
        )
        size = math.sqrt(sum(float(grad.square().sum()) for grad in expected.values()))
        for name, parameter in module.named_parameters():
            if name in expected:
                assert parameter.grad is not None, (method, name)
                off = float((parameter.grad - expected[name]).norm())
                assert off < 1e-3 * (float(expected[name].norm()) + 0.01 * size), (method, name)
        own.optimizer.zero_grad()


@pytest.mark.parametrize("family", STATEFUL)
def test_a_state_beside_keys_and_values_is_read_padded_in_bfloat16_too_and_the_engine_refuses_it(family: str) -> None:
    module = build(family, torch.bfloat16)
    assert isinstance(chosen(module), PaddedForward)
    with pytest.raises(UserError, match=f"the engine cannot run {family}"):
        Engine(module)


class HalfGradient(torch.autograd.Function):
    """The identity, whose backward pass returns half of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / 2


def test_a_right_forward_with_a_wrong_gradient_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    read = PackedForward.read

    def halved(self: PackedForward, batch: TrainBatch, *args: Any, **more: Any) -> ForwardOutput:
        found = read(self, batch, *args, **more)
        return ForwardOutput(HalfGradient.apply(found.logprobs))

    monkeypatch.setattr(PackedForward, "read", halved)
    with pytest.warns(UserWarning, match=r"lean: the gradient of .* differs from the model's own by 0.5"):
        assert isinstance(forward_of(build("Llama")), PaddedForward)


def test_one_weight_in_hundreds_may_round_badly_and_a_kind_of_weight_may_not() -> None:
    own = {f"layers.{n}.{name}.weight": torch.ones(8) for n in range(32) for name in ("q_proj", "o_proj")}
    unlucky = own | {"layers.7.q_proj.weight": torch.full((8,), 1.21)}
    assert gradient_gap(unlucky, own, 0.2, 0.5) is None
    assert "layers.7.q_proj" in str(gradient_gap(unlucky, own, 0.2, 0.2))
    wrong = {name: value * (1.21 if "q_proj" in name else 1.0) for name, value in own.items()}
    assert "layers.*.q_proj.weight differs from the model's own by 0.21" in str(gradient_gap(wrong, own, 0.2, 0.5))


def roughen(monkeypatch: pytest.MonkeyPatch, wrong: Any = None) -> None:
    """Add noise to the gradients of lean blocks, and double that of the block that has the weight `wrong`."""
    backward, draws = Block.backward, torch.Generator().manual_seed(0)

    def rough(self: Block, *args: Any) -> tuple[Tensor | None, Gradients]:
        d, grads = backward(self, *args)
        if d is not None:
            noise = torch.randn(d.shape, generator=draws) * d.float().norm() / d.numel() ** 0.5
            d = d + 0.1 * noise.to(d.dtype)
        factor = 2.0 if any(parameter is wrong for parameter, _ in grads) else 1.0
        return d, [(parameter, factor * grad) for parameter, grad in grads]

    monkeypatch.setattr(Block, "backward", rough)


def deep(dtype: torch.dtype) -> Any:
    """Many blocks, all trained; what the first of them hands on is nobody's gradient."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 12, "initializer_range": 0.1})
    module = transformers.LlamaForCausalLM(config).to(dtype)
    module.model.embed_tokens.requires_grad_(False)
    return module


def test_in_16_bits_noise_that_grows_with_depth_is_not_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    roughen(monkeypatch)
    module = deep(torch.bfloat16)
    blocks = module.model.layers
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the learner falls back")
        forward = forward_of(module)
    assert isinstance(forward, PackedForward) and isinstance(forward.states, LeanForward)
    assert module.model.layers is blocks and len(forward.states.layers) == 12
    with pytest.warns(UserWarning, match="slower forward: lean: the gradient of"):
        forward_of(deep(torch.float32))


def test_one_block_with_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = deep(torch.bfloat16)
    roughen(monkeypatch, wrong=module.model.layers[5].self_attn.o_proj.weight)
    with pytest.warns(UserWarning, match=r"slower forward: lean: block 5: the gradient of model\.layers"):
        forward_of(module)


def test_a_forward_whose_backward_pass_fails_is_found_before_the_first_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("zip() argument 2 is longer than argument 1")

    monkeypatch.setattr(Product, "gradients", broken)
    with pytest.warns(UserWarning, match="slower forward: lean: ValueError: zip"):
        forward = forward_of(build("Qwen2"))
    assert isinstance(forward, PackedForward)


def test_if_no_forward_matches_the_models_gradients_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read = PaddedForward.read

    def halved(self: PaddedForward, batch: TrainBatch, *args: Any, **more: Any) -> ForwardOutput:
        return ForwardOutput(HalfGradient.apply(read(self, batch, *args, **more).logprobs))

    monkeypatch.setattr(PaddedForward, "read", halved)
    with pytest.raises(UserError, match=r"Mamba.* cannot be trained: .*linear_attention.*padded: the gradient"):
        chosen(build("Mamba"))


def test_the_check_changes_no_state() -> None:
    module = build("Llama").eval()
    module.model.layers[1].train()
    before = [p.detach().clone() for p in module.parameters()]
    state = torch.get_rng_state()
    forward_of(module)
    assert torch.equal(state, torch.get_rng_state())
    assert [part.training for part in module.model.layers] == [False, True]
    assert all(p.grad is None and torch.equal(p, own) for p, own in zip(module.parameters(), before, strict=True))


def test_weights_with_biases_are_updated_more_than_once() -> None:
    """Between updates the same products are reused if weights and biases have not moved."""
    module = build("Qwen2")
    own = Learner(module, shared_tokenizer(), TrainConfig(lr=1e-2))
    assert isinstance(own.forward, PackedForward)
    biases = [p for name, p in module.named_parameters() if name.endswith("bias")]
    assert biases
    before = [p.detach().clone() for p in biases]
    found = []
    for _ in range(3):
        found.append(own.forward_backward([[datum] for datum in data()], Sft())["loss/nll"])
        own.step()
    assert found[2] < found[1] < found[0]
    assert not any(torch.equal(a, b) for a, b in zip(before, biases, strict=True))
