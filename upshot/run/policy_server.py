"""The run's own vLLM server: a serve file of one server in the run folder, up while the run lasts (`serving/servers`).

The supervisor starts it, watches it, starts it again when it ends, and leaves nothing behind. Where it is once it is
up: `serving/vllm/launch.py`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from upshot.config.recipe import Recipe
from upshot.core.conversation import derive_seed
from upshot.core.errors import UserError
from upshot.models.local import adapter_config, local_path, pick_device, pick_dtype
from upshot.serving import vllm
from upshot.serving.servers.file import ServerConfig
from upshot.serving.servers.state import lease
from upshot.serving.vllm.launch import (
    KEY,
    NAME,
    START_S,
    Address,
    ServerDown,
    VllmClient,
    devices_of,
    file_of,
    find,
    own_gpu,
    share_of,
    sleep_level,
)
from upshot.tasks.base import tasks
from upshot.training.adapters import find_start
from upshot.training.setup import find_context, load_policy

INSIDE = Path(vllm.__file__).parent / "inside"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM makes room for."""


def needs_server(recipe: Recipe) -> bool:
    """Whether a run of the recipe has a server of its own."""
    return recipe.model.engine.name == "vllm" and recipe.train.samples


@contextmanager
def serve_policy(recipe: Recipe, run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Have the policy's server up; nothing happens where the embedded engine samples."""
    if not needs_server(recipe):
        yield
        return
    file = file_of(run)
    say("engine     vllm; train.importance: " + recipe.train.importance.rule)
    file.parent.mkdir(exist_ok=True)
    os.environ[KEY] = secrets.token_hex(16)
    server = server_of(recipe, model_of(recipe, run))
    text = {"api_key_env": KEY, "start_s": START_S, "servers": {NAME: server.model_dump(exclude_defaults=True)}}
    file.write_text(yaml.safe_dump(text, sort_keys=False))
    with lease(str(file), say):
        if own_gpu(recipe) in devices_of(recipe):  # so that the learner's memory is planned as it will be
            asyncio.run(_to_sleep(find(recipe, run), sleep_level(recipe)))
        yield


async def _to_sleep(address: Address, level: int) -> None:
    client = VllmClient(address.url, address.key)
    try:
        await client.sleep(level)
    except ServerDown as error:
        raise UserError(f"vLLM does not sleep ({error}); its log: {address.log}") from error
    finally:
        await client.close()


def server_of(recipe: Recipe, model: str) -> ServerConfig:
    """The server as a serve file says it."""
    engine, gpus = recipe.model.engine, devices_of(recipe)
    beside = own_gpu(recipe) in gpus
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", **engine.environment}
    environment["PYTHONPATH"] = os.pathsep.join([str(INSIDE), *filter(None, [engine.environment.get("PYTHONPATH")])])
    return ServerConfig(
        model=model,
        engine="vllm",
        devices=gpus or "cpu",
        memory=share_of(recipe) if gpus else None,
        program=engine.program,
        arguments=[*arguments_of(recipe, beside), *engine.arguments],
        environment=environment,
    )


def arguments_of(recipe: Recipe, beside: bool) -> list[str]:
    """What makes vLLM sample as the recipe says and the learner computes."""
    config, episode = recipe.model, recipe.episode
    kind = str(pick_dtype(config.dtype, pick_device(config.device))).removeprefix("torch.")
    words = ["--middleware", "upshot_gate.WeightsGate", "--worker-extension-cls", "upshot_hands.WeightsWorker"]
    words += ["--dtype", kind, "--generation-config", "vllm"]  # not the model's own temperature and penalties
    words += ["--max-model-len", str(context)] if (context := find_context(config)) else []
    # Ours are those after temperature and before any cut.
    cut = episode.top_p < 1 or episode.top_k > 0
    words += ["--logprobs-mode", "raw_logprobs" if cut else "processed_logprobs"]
    words += ["--enable-sleep-mode"] if beside else []
    if config.lora is None:
        return [*words, "--load-format", "dummy"]  # the learner's weights come before the first request
    room = next((rank for rank in RANKS if rank >= config.lora.r), config.lora.r)
    return [*words, "--enable-lora", "--max-loras", "1", "--max-lora-rank", str(room)]


def model_of(recipe: Recipe, run: Path) -> str:
    """The model that the server begins with: a folder or name of the hub; a new tiny one is saved beside the file."""
    start = find_start(recipe.model, run, lambda _: None)
    if start.model:
        adapter = adapter_config(start.model)
        return local_path(adapter["base_model_name_or_path"] if adapter else start.model)
    from transformers.utils import logging

    logging.disable_progress_bar()  # the run has its own
    folder = run.resolve() / "vllm" / "model"
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    module, tokenizer = load_policy(recipe.model, task, derive_seed(recipe.seed, "weights"))
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
