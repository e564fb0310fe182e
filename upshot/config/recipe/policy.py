"""The model in training: where it comes from, its adapters, its precision, and what samples it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from upshot.config.bounds import Words
from upshot.config.recipe.base import Section, Text


class LoraConfig(Section):
    """Low-rank adapters (peft) instead of full fine-tuning."""

    kind: Literal["lora", "rslora", "dora"] = "lora"
    """rslora: the update is multiplied by alpha / sqrt(r). dora: the length of each output's weights is trained beside
    their direction."""
    r: int = Field(32, ge=1)
    """Rank."""
    alpha: int = Field(16, ge=1)
    """Scale: the update is multiplied by alpha / r (rslora: alpha / sqrt(r))."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on the adapter's input."""
    targets: list[Words] | None = Field(None, min_length=1)
    """Module names, embed_tokens and lm_head among them; None: those of the adapter that `model.path` holds, else the
    seven projections of Llama-like models, or all linear layers where those are absent."""


class TinyConfig(Section):
    """A new Llama of random weights, for the quickstart and for tests; its tokenizer comes from the task."""

    hidden: int = Field(128, ge=1)
    """Width of the residual stream."""
    layers: int = Field(4, ge=1)
    """Number of blocks."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    mlp: int = Field(384, ge=1)
    """Width of the MLP."""
    context: int = Field(256, ge=1)
    """Most positions."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> TinyConfig:
        """Rotary positions turn pairs of numbers, so that each head's share of the width is even."""
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"model.tiny.hidden is {self.hidden}, which {self.heads} heads cannot share in pairs; "
                f"it must be a multiple of {2 * self.heads} (2 x heads)"
            )
        return self


class EngineConfig(Section):
    """What samples the policy's replies; a name alone will do."""

    short_key: ClassVar[str] = "name"
    own_options: ClassVar[bool] = True

    name: Literal["upshot", "vllm"] = "upshot"
    """upshot: the embedded engine, on the learner's own tensors. vllm: a vLLM server of the run's own, which gets the
    learner's weights after every step; see docs/vllm.md."""
    weights: Literal["model", "fp8"] = "model"
    """upshot: model samples from the model's own numbers. fp8: from its projections in 8 bits, quantized again after
    every update (a GPU of Hopper's generation or later, bfloat16); `train.importance` then weighs what that changes."""
    kv: Literal["model", "fp8"] = "model"
    """upshot: fp8 keeps keys and values in 8 bits, twice as many of them in the same memory, and reads them in half the
    time (a GPU, the engine's own block); `train.importance` weighs what that changes, too."""
    program: str = "vllm"
    """vllm: the program, such as /opt/vllm/bin/vllm; its Python environment may be another one."""
    devices: Literal["policy", "cpu"] | list[int] = "policy"
    """vllm: GPUs by number, among those that are visible. policy: that of `model.device`, where vLLM sleeps while the
    learner works."""
    memory: float | None = Field(None, gt=0, le=1)
    """vllm: share of each of its GPUs; None: 0.9, or 0.4 beside the learner."""
    arguments: list[Text] = Field(default_factory=list)
    """vllm: further words of its command line."""
    environment: dict[str, Text] = Field(default_factory=dict)
    """vllm: further environment variables."""

    @model_validator(mode="after")
    def _nothing_idle(self) -> EngineConfig:
        if self.name == "upshot" and self.model_dump(exclude={"name", "weights", "kv"}, exclude_defaults=True):
            raise ValueError("program, devices, memory, arguments and environment are of engine vllm; set name: vllm")
        if self.name == "vllm" and self.weights != "model":
            raise ValueError("weights is of engine upshot; for vLLM: arguments: [--quantization, fp8]")
        if self.name == "vllm" and self.kv != "model":
            raise ValueError("kv is of engine upshot; for vLLM: arguments: [--kv-cache-dtype, fp8]")
        return self

    @property
    def rounds_otherwise(self) -> bool:
        """Whether what it samples from is not quite what the learner computes with, rounding of sums apart."""
        return self.name == "vllm" or "fp8" in (self.weights, self.kv)


class PolicyConfig(Section):
    """The model in training."""

    path: str = ""
    """A Hugging Face folder or name, or 'smollm2-135m'; empty: a new tiny model as `tiny` says."""
    tiny: TinyConfig = TinyConfig()
    """Shape of the new model when `path` is empty."""
    lora: LoraConfig | None = None
    """Train adapters only; None trains all weights."""
    quantize: Literal["none", "4bit"] = "none"
    """4bit: the weights below the adapters in 4 bits (NF4; QLoRA); needs bitsandbytes and `lora`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on the CPU."""
    device: str = "auto"
    """auto: the first GPU, else the CPU."""
    chat_template: Words | None = None
    """A Jinja chat template (text, or a path to one) instead of the tokenizer's own."""
    end_token: Words | None = None
    """The token that ends an assistant turn, such as </s>, if the template writes none. None: the template's own."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Options passed to the chat template, such as {enable_thinking: false}."""
    max_context: int = Field(0, ge=0)
    """Most tokens of prompt and reply together; 0: what the model's configuration says."""
    gradient_checkpointing: Literal["auto", "none", "mlp", "block"] = "auto"
    """What the learner computes again in the backward pass instead of keeping it. block (or true): each block, a third
    more work for a fraction of the memory. mlp: only the way up of each MLP, half of that work for about half of the
    memory. none (or false): nothing. auto: as little as the memory plan needs."""
    memory_gb: float = Field(0.0, ge=0, le=1e6)
    """GiB of the device that the run may plan with; 0: what the GPU has."""
    exact: bool = False
    """Sampler and learner agree bitwise on every log-probability, whatever the batch; slower, see docs/engine.md."""
    engine: EngineConfig = EngineConfig()
    """What samples its replies: upshot (the embedded engine) or vllm."""

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _yes_or_no(cls, value: Any) -> Any:
        return {True: "block", False: "none"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _only_adapters(self) -> PolicyConfig:
        if self.quantize != "none" and self.lora is None:
            raise ValueError("weights in 4 bits cannot be trained: set `lora` beside quantize, or quantize: none")
        return self

    @model_validator(mode="after")
    def _sampled_otherwise(self) -> PolicyConfig:
        """Refuse what cannot be sampled as the learner computes it."""
        if self.engine.name == "upshot":
            if self.exact and self.engine.rounds_otherwise:
                raise ValueError("exact: log-probabilities in 8 bits are not the learner's; leave out one of the two")
            return self
        if self.exact:
            raise ValueError("exact: vLLM's kernels are not the learner's; leave it out, or engine: upshot")
        if self.quantize != "none":
            raise ValueError("quantize: vLLM would round the weights in its own way; quantize: none, or engine: upshot")
        if self.lora is not None and (
            self.lora.kind == "dora" or {"embed_tokens", "lm_head"} & {*(self.lora.targets or ())}
        ):
            raise ValueError(
                "lora: vLLM has no DoRA and no adapters on embedding or head; leave those, or engine: upshot"
            )
        return self
