"""The run's own vLLM server: a serve file of one server in the run folder, up while the run lasts (`serving/servers`).

The fleet starts it, watches it, starts it again when it ends, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import Recipe
from upshot.core.conversation import derive_seed
from upshot.core.errors import UserError
from upshot.models.local import adapter_config, local_path, pick_device, pick_dtype
from upshot.run.plan import SAMPLED
from upshot.serving.servers.file import ServerConfig
from upshot.serving.servers.lease import lease
from upshot.serving.servers.state import folder_of, is_up, read_state
from upshot.serving.vllm.door import Door, Down
from upshot.tasks.base import tasks
from upshot.training.adapters import find_start
from upshot.training.learner.memory.plan import MemoryPlan, usable
from upshot.training.setup import find_context, load_policy

NAME = "policy"
KEY = "UPSHOT_POLICY_KEY"
"""Environment variable with the server's key, which every run makes anew."""
INSIDE = Path(__file__).parent / "inside"
START_S = 900.0
BESIDE, ALONE = 0.4, 0.9
"""Share of a GPU's memory, beside the learner and without it."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM makes room for."""


@dataclass(frozen=True)
class Address:
    """Where the policy's server is."""

    spec: ModelSpec
    """How it is called."""
    key: str
    log: Path
    same_gpu: bool = False
    """Whether it shares a GPU with the learner."""
    level: int = 2
    """How deeply it sleeps there."""
    workers: int = 1
    start_s: float = START_S
    is_up: Callable[[], bool] = lambda: True
    """Whether somebody would start it again."""

    @property
    def url(self) -> str:
        """Its address, with /v1."""
        return str(self.spec.url)


def wanted(recipe: Recipe) -> bool:
    """Whether a run of the recipe has a server of its own."""
    return recipe.model.engine.name == "vllm" and recipe.train.method in SAMPLED


@contextmanager
def served(recipe: Recipe, run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Have the policy's server up; nothing happens where the embedded engine samples."""
    if not wanted(recipe):
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
    door = Door(address.url, address.key)
    try:
        await door.sleep(level)
    except Down as error:
        raise UserError(f"vLLM does not sleep ({error}); its log: {address.log}") from error
    finally:
        await door.close()


def sleep_level(recipe: Recipe) -> int:
    """1 keeps the weights on the host: those below adapters do not come again. 2 forgets them."""
    return 2 if recipe.model.lora is None else 1


def check_beside(plan: MemoryPlan, share: float, total: int) -> None:
    """Refuse a GPU on which vLLM, awake, does not fit beside what the learner keeps."""
    kept, taken = sum(part.sampling for part in plan.parts), int(share * total)
    if total and kept + taken > usable(total):
        gib = 2**30
        raise UserError(
            f"model.engine.memory {share:g} of {total / gib:.1f} GiB is {taken / gib:.1f}, and the learner keeps "
            f"{kept / gib:.1f} (weights, optimizer) while vLLM samples: more than {usable(total) / gib:.1f}; lower "
            "model.engine.memory, set train.offload_optimizer or optimizer: adamw-8bit, or give vLLM other devices"
        )


def file_of(run: Path) -> Path:
    """The serve file of a run's policy."""
    return run / "vllm" / f"{NAME}.yaml"


def find(recipe: Recipe, run: Path) -> Address:
    """Where the server is that `served` has up."""
    folder = folder_of(file_of(run))
    state = read_state(folder)
    if state is None:
        raise UserError(f"the policy's vLLM server is not up; its log: {folder / f'{NAME}.log'}")
    server = state["servers"][NAME]
    spec = ModelSpec(
        url=server["url"], model=NAME, token_ids=True, api_key_env=KEY, concurrency=1024, retries=0, timeout_s=3600
    )
    gpus = devices_of(recipe)
    return Address(
        spec,
        os.environ[KEY],
        Path(server["log"]),
        same_gpu=own_gpu(recipe) in gpus,
        level=sleep_level(recipe),
        workers=max(len(gpus), 1),
        is_up=lambda: is_up(folder),
    )


def own_gpu(recipe: Recipe) -> int | None:
    """The number of the learner's GPU; None: the CPU."""
    kind, _, number = pick_device(recipe.model.device).partition(":")
    return int(number or 0) if kind == "cuda" else None


def devices_of(recipe: Recipe) -> list[int]:
    """The server's GPUs; none: the CPU."""
    wished = recipe.model.engine.devices
    if wished == "policy":
        own = own_gpu(recipe)
        return [] if own is None else [own]
    return [] if wished == "cpu" else [int(number) for number in wished]


def share_of(recipe: Recipe) -> float:
    """Which part of its GPUs' memory the server takes while it is awake."""
    return recipe.model.engine.memory or (BESIDE if own_gpu(recipe) in devices_of(recipe) else ALONE)


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
    words = ["--middleware", "upshot_gate.Gate", "--worker-extension-cls", "upshot_hands.Hands"]
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
        found = adapter_config(start.model)
        return local_path(found["base_model_name_or_path"] if found else start.model)
    from transformers.utils import logging

    logging.disable_progress_bar()  # the run has its own
    folder = run.resolve() / "vllm" / "model"
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    module, tokenizer = load_policy(recipe.model, task, derive_seed(recipe.seed, "weights"))
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
