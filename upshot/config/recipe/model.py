"""The model in training: where it comes from, its adapters, its precision, and what samples it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from upshot.config.bounds import Words
from upshot.config.recipe.base import Section, Text


class LoraConfig(Section):
    """Low-rank adapters (peft) instead of full fine-tuning."""

    kind: Literal["lora", "rslora", "dora"] = "lora"
    """rslora: the update is multiplied by alpha / sqrt(r). dora: the magnitude of each output's weight vector is
    trained separately from its direction."""
    r: int = Field(32, ge=1)
    """Rank."""
    alpha: int = Field(16, ge=1)
    """Scale: the update is multiplied by alpha / r (rslora: alpha / sqrt(r))."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on the adapter's input."""
    targets: list[Words] | None = Field(None, min_length=1)
    """Names of the modules that get adapters; embed_tokens and lm_head are possible. None: those of the adapter in
    `model.path`, else the seven projections of Llama-like models, or all linear layers in models without these."""


class TinyConfig(Section):
    """A new Llama with random weights, for the quickstart and for tests; its tokenizer comes from the task.

    Upper bounds are those of the largest models: a dry run builds every block, so it must not get a mistyped size.
    """

    hidden: int = Field(128, ge=1, le=2**16)
    """Width of the residual stream."""
    layers: int = Field(4, ge=1, le=512)
    """Number of blocks."""
    heads: int = Field(4, ge=1, le=2**15)
    """Attention heads."""
    mlp: int = Field(384, ge=1, le=2**18)
    """Width of the MLP."""
    context: int = Field(256, ge=1, le=2**24)
    """Maximum number of positions."""

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
    """What samples the policy's replies; a plain string is short for `name`."""

    short_key: ClassVar[str] = "name"
    own_options: ClassVar[bool] = True

    name: Literal["upshot", "vllm"] = "upshot"
    """upshot: the embedded engine, on the learner's own tensors. vllm: a vLLM server that the run starts and that gets
    the learner's weights after every step; see docs/vllm.md."""
    weights: Literal["model", "fp8"] = "model"
    """upshot: model: sample with the model's own weights. fp8: sample with the projections in 8 bits, quantized again
    after every update (needs a Hopper GPU or later, and bfloat16); `train.importance` then corrects for the
    difference."""
    kv: Literal["model", "fp8"] = "model"
    """upshot: fp8 stores keys and values in 8 bits: twice as many fit in the same memory, and reading them takes half
    the time (needs a GPU and a model family that the fused block supports); `train.importance` corrects for the
    difference."""
    program: str = "vllm"
    """vllm: the program, such as /opt/vllm/bin/vllm; it may be installed in a different Python environment."""
    devices: Literal["policy", "cpu"] | list[int] = "policy"
    """vllm: GPUs by number, counting only visible ones. policy: the GPU of `model.device`; vLLM sleeps there while the
    learner works."""
    memory: float | None = Field(None, gt=0, le=1)
    """vllm: share of each GPU's memory; None: 0.9, or 0.4 on the learner's GPU."""
    arguments: list[Text] = Field(default_factory=list)
    """vllm: extra command-line arguments."""
    environment: dict[str, Text] = Field(default_factory=dict)
    """vllm: extra environment variables."""

    @model_validator(mode="after")
    def _nothing_idle(self) -> EngineConfig:
        if self.name == "upshot" and self.model_dump(exclude={"name", "weights", "kv"}, exclude_defaults=True):
            raise ValueError(
                "program, devices, memory, arguments and environment apply only to the engine vllm; set name: vllm"
            )
        if self.name == "vllm" and self.weights != "model":
            raise ValueError("weights applies only to the engine upshot; for vLLM set arguments: [--quantization, fp8]")
        if self.name == "vllm" and self.kv != "model":
            raise ValueError("kv applies only to the engine upshot; for vLLM set arguments: [--kv-cache-dtype, fp8]")
        return self

    @property
    def rounds_otherwise(self) -> bool:
        """Whether it samples from numbers that differ from the learner's by more than the rounding of sums."""
        return self.name == "vllm" or "fp8" in (self.weights, self.kv)


class PolicyConfig(Section):
    """The model in training."""

    path: str = ""
    """A Hugging Face folder or name, or 'smollm2-135m'; empty: a new tiny model with the shape given by `tiny`."""
    tiny: TinyConfig = TinyConfig()
    """Shape of the new model when `path` is empty."""
    lora: LoraConfig | None = None
    """Train adapters only; None trains all weights."""
    quantize: Literal["none", "4bit"] = "none"
    """4bit: keep the frozen weights under the adapters in 4 bits (NF4; QLoRA); needs bitsandbytes and `lora`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU that computes with it (Ampere or later), else float32."""
    device: str = "auto"
    """auto: the first GPU, else the CPU."""
    chat_template: Words | None = None
    """A Jinja chat template (text, or a path to one) instead of the tokenizer's own."""
    end_token: Words | None = None
    """The token that ends an assistant turn, such as </s>, for templates that write none. None: the template's own."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Options passed to the chat template, such as {enable_thinking: false}."""
    max_context: int = Field(0, ge=0)
    """Maximum number of tokens in prompt and reply together; 0: the value in the model's configuration."""
    gradient_checkpointing: Literal["auto", "none", "mlp", "block"] = "auto"
    """What the learner recomputes in the backward pass instead of keeping it. block (or true): each block: a third
    more work for a fraction of the memory. mlp: only the up-projection of each MLP: half of that extra work for about
    half of the memory. none (or false): nothing. auto: as little as the memory plan requires."""
    memory_gb: float = Field(0.0, ge=0, le=1e6)
    """Device memory in GiB that the memory plan may use; 0: all of the GPU's memory."""
    exact: bool = False
    """Make sampler and learner agree bitwise on every log-probability, whatever the batch; slower, see
    docs/engine.md."""
    engine: EngineConfig = EngineConfig()
    """What samples the policy's replies: upshot (the embedded engine) or vllm."""

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _yes_or_no(cls, value: Any) -> Any:
        return {True: "block", False: "none"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _only_adapters(self) -> PolicyConfig:
        if self.quantize != "none" and self.lora is None:
            raise ValueError("4-bit weights cannot be trained; set `lora` as well, or quantize: none")
        return self

    @model_validator(mode="after")
    def _sampled_otherwise(self) -> PolicyConfig:
        """Refuse what cannot be sampled as the learner computes it."""
        if self.engine.name == "upshot":
            if self.exact and self.engine.rounds_otherwise:
                raise ValueError(
                    "exact: log-probabilities computed in 8 bits differ from the learner's; drop exact or fp8"
                )
            return self
        if self.exact:
            raise ValueError("exact: vLLM's kernels differ from the learner's; drop exact, or set engine: upshot")
        if self.quantize != "none":
            raise ValueError("quantize: vLLM would round the weights differently; set quantize: none or engine: upshot")
        on_ends = self.lora is not None and {"embed_tokens", "lm_head"} & {*(self.lora.targets or ())}
        if self.lora is not None and (self.lora.kind == "dora" or on_ends):
            raise ValueError(
                "lora: vLLM supports neither DoRA nor adapters on embedding or head; drop those, or set engine: upshot"
            )
        return self
