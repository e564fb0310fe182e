"""Fault 9 of the published code: online DPO and PPO kept sampling from the adapter of the first step."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import pytest
import torch

from tests.collabllm.smoke import tiny_folder
from upshot.config.recipe import LoraConfig, PolicyConfig, TrainConfig
from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.engine.engine import Engine
from upshot.models.base import Request
from upshot.models.engine_model import EngineModel
from upshot.models.local import load_local
from upshot.models.rendering import Renderer
from upshot.training.adapters import add_lora
from upshot.training.learner.batch import Datum
from upshot.training.learner.forward.padded import token_logprobs
from upshot.training.learner.learner import Learner
from upshot.training.loops.sft import Sft


def test_fault_9_sampling_kept_to_a_stale_adapter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, tokenizer = load_local(str(tiny_folder(tmp_path)), device="cpu")
    module = add_lora(module, PolicyConfig(lora=LoraConfig(r=4)))
    renderer = Renderer(tokenizer)
    engine = Engine(module, renderer.end_ids)
    sampler = EngineModel(engine, tokenizer, "policy", renderer)
    learner = Learner(module, tokenizer, TrainConfig(lr=0.02), changed=engine.weights_changed)
    prompt = renderer.prompt_ids([Message("user", "What is it?")])
    seen: list[tuple[float, ...]] = []
    for step in range(4):
        (said,) = asyncio.run(sampler.generate(Request(prompt, Sampling(8, seed=1))))
        assert said.version == step
        merged = copy.deepcopy(module).merge_and_unload()  # the current weights, computed in another way
        ids = torch.tensor([[*prompt, *said.ids]])
        with torch.no_grad():
            expected = token_logprobs(merged(ids).logits, ids)[0, len(prompt) :].tolist()
        assert said.logprobs == pytest.approx(expected, abs=1e-4), "sampled from the adapter as it is now"
        assert said.logprobs not in seen, "and the adapter has changed since the last step"
        seen.append(said.logprobs)
        learner.forward_backward([[Datum(ids[0].tolist(), [0] * len(prompt) + [1] * len(said.ids))]], Sft())
        learner.step()
