"""verl's critic on a CPU: verl always loads a value model with flash attention, which needs a GPU."""

from __future__ import annotations

import copy
from typing import Any

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from tests.support.verl_cpu.settings import PLATFORM

DEVICE = "cuda"
"""The devices that verl's engines are listed for, and what our platform answers when verl looks for one."""


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device=DEVICE, vendor=PLATFORM)  # type: ignore[untyped-decorator]
class ValueEngine(FSDPEngineWithValueHead):  # type: ignore[misc]
    """verl's own engine, but the model is loaded with the attention that its config names."""

    model_config: Any

    def _build_module(self) -> Any:
        given = self.model_config
        named = given.hf_config
        named.num_labels, named.classifier_dropout = 1, 0.0
        named.architectures = [named.architectures[0].replace("ForCausalLM", "ForTokenClassification")]
        twin = copy.copy(given)
        object.__setattr__(twin, "model_type", "language_model")  # verl freezes its configs
        self.model_config = twin
        try:
            return super()._build_module()
        finally:
            self.model_config = given
