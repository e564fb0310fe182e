"""Models in this process: a Hugging Face folder (or hub name), `smollm2-135m`, or the policy that a caller lends."""

from __future__ import annotations

import atexit
import gc
import json
import pickle
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Unpack

from upshot.config.load import list_recipes
from upshot.config.model_spec import SMOLLM2, ModelSpec
from upshot.config.phases import phase_order
from upshot.core.errors import UserError
from upshot.core.files import expand_home, suggest_neighbour
from upshot.core.threads import settle_threads
from upshot.models.base import Model, Request
from upshot.models.client.guarded import GuardedModel, Guards
from upshot.models.client.limits import EndpointLimits
from upshot.models.openai_format import ApiAnswer


def import_frameworks() -> None:
    """Import what every model in this process needs, without garbage collection meanwhile.

    Imports create a million objects that stay. A thousand collections between them took an eighth of their time.
    """
    if "transformers.modeling_utils" in sys.modules:
        return
    settle_threads()
    collecting = gc.isenabled()
    gc.disable()
    try:
        import torch
        import transformers.modeling_utils

        assert torch and transformers
    finally:
        collect_rarely()
        atexit.register(gc.unfreeze)  # triton's bindings report objects that are frozen at the end as leaked
        if collecting:
            gc.enable()


def collect_rarely() -> None:
    """Never search the objects that exist now for garbage again, and new ones seldom.

    Replies are many small objects without cycles, which reference counts free. With Python's own threshold of 700, a
    step of 128 replies with three futures each spent 70 ms searching them; with this one it is 15.
    """
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def local_path(name: str) -> str:
    """The folder (or hub name) behind the name of a local model: of a run folder its best checkpoint, else its newest.

    `smollm2-135m` is converted at its first use.
    """
    name = name.removeprefix("local:")
    if name == SMOLLM2:
        from upshot.models.smollm2 import smollm2_folder

        return str(smollm2_folder())
    folder = Path(expand_home(name))
    if folder.is_dir():
        if (folder / "checkpoints").is_dir() and not (folder / "config.json").is_file():
            folder = _checkpoint_of(folder)
        if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise UserError(f"the folder '{name}' has no config.json: it is not a model in Hugging Face's format")
        return str(folder)
    above = Path(name).parts[:-1]
    if name.startswith((".", "/", "~")) or (above and Path(above[0]).is_dir()):  # runs/X, and there is a folder runs
        recipe = next((part for part in reversed(folder.parts) if part in list_recipes()), None)
        way_out = f"; train it first: upshot train {recipe}" if recipe else suggest_neighbour(folder)
        raise UserError(f"there is no folder '{name}'{way_out}")
    if "/" not in name and get_close_matches(name.lower(), [SMOLLM2], cutoff=0.8):
        raise UserError(f"there is no model '{name}'; did you mean '{SMOLLM2}'?")
    return name


def describe_choice(name: str) -> str:
    """The checkpoint that a run folder stands for, as text; empty for anything else."""
    run = Path(expand_home(name.removeprefix("local:")))
    if not (run / "checkpoints").is_dir() or (run / "config.json").is_file():
        return ""
    kind = "best" if (run / "checkpoints" / "best.json").is_file() else "newest"
    return f"{run}: its {kind} checkpoint, {_checkpoint_of(run).name}"


def _checkpoint_of(run: Path) -> Path:
    """The checkpoint that a run folder stands for; `run/checkpoints.py`, which is above, has written them."""
    saved = {path.parent: json.loads(path.read_text()) for path in run.glob("checkpoints/[!.]*-*/state.json")}
    if not saved:
        raise UserError(f"the run folder '{run}' has no checkpoint yet")
    best = run / "checkpoints" / "best.json"
    chosen = best.parent / json.loads(best.read_text())["checkpoint"] if best.is_file() else None
    newest = max(saved, key=lambda path: phase_order(saved[path]["phase"], saved[path]["step"]))
    return chosen if chosen in saved else newest


def pick_device(name: str) -> str:
    """The device that a name means here; 'auto' is the first GPU, else the CPU."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        why = "" if name == "gpu" else f" ({str(error).splitlines()[0]})"
        raise UserError(f"cannot use the device '{name}'{why}; use auto, cpu, cuda or cuda:1") from error
    return name


def pick_dtype(name: str, device: str) -> Any:
    """The torch type that a name means; 'auto' is bfloat16 on a GPU that computes with it, else float32."""
    import torch

    if name == "auto":
        kind = torch.device(device).type
        emulated = kind == "cuda" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(False)
        return torch.float32 if kind == "cpu" or emulated else torch.bfloat16
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise UserError(f"'{name}' is not a dtype; give float32, bfloat16, float16 or auto")
    return kind


def load_local(name: str, dtype: str = "auto", device: str = "auto", four_bits: bool = False) -> tuple[Any, Any]:
    """(module, tokenizer) of a folder, hub name or `smollm2-135m`; auto: bfloat16 where a GPU computes with it.

    Many CPUs have no bfloat16 arithmetic and take hundreds of times as long with it, so auto never picks it there.
    `four_bits`: the projections are in 4 bits (NF4, scales quantized too); embedding, head and norms are not.
    """
    if four_bits and find_spec("bitsandbytes") is None:
        raise UserError(NO_BITSANDBYTES)
    path = local_path(name)
    import_frameworks()
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # callers show their own progress, or none

    device = pick_device(device)
    kind = pick_dtype(dtype, device)
    tokenizer = load_tokenizer(name)
    options: dict[str, Any] = {"dtype": kind}
    if four_bits:
        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": kind}
        options |= {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **nf4), "device_map": device}
    try:
        module: Any = AutoModelForCausalLM.from_pretrained(path, **options)
    except (SafetensorError, *DAMAGED) as error:
        bits = " in 4 bits" if four_bits else ""
        raise UserError(f"cannot load the model '{name}'{bits}: {describe_damage(error)}") from error
    return (module if four_bits else module.to(device)).eval(), tokenizer


DAMAGED = (OSError, ValueError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError)
"""Raised by reading a file of weights that is cut off, of another format or of another model."""


def describe_damage(error: BaseException) -> str:
    """What is wrong with a file of weights, without torch's advice (which includes running the code in it)."""
    line = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, pickle.UnpicklingError | EOFError) or "PytorchStreamReader" in line:
        return "a file of weights is cut off, damaged, or contains more than tensors, which is never loaded"
    return f"{type(error).__name__} {line}" if isinstance(error, KeyError) else line or type(error).__name__


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a folder, hub name or `smollm2-135m`."""
    given_folder = Path(expand_home(name))  # a folder may hold a tokenizer and no model
    path = str(given_folder) if (given_folder / "tokenizer_config.json").is_file() else local_path(name)
    folder = Path(path)
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise UserError(
            f"the model folder '{name}' has no tokenizer (tokenizer.json, …); copy those files of its base model there"
        )
    if not folder.is_dir():
        _ask_hub(path)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the tokenizer of '{name}': {error}") from None


@cache
def _ask_hub(name: str) -> None:
    """Ask the hub whether it has a model, once: transformers would repeat a failing request for minutes."""
    from huggingface_hub import HfApi, constants, errors, try_to_load_from_cache

    known = f"give a folder, a name of the Hugging Face hub, or '{SMOLLM2}'"
    try:
        # A model of an earlier download may have either file, and needs no hub.
        cached = [try_to_load_from_cache(name, file) for file in ("config.json", "adapter_config.json")]
        if not constants.HF_HUB_OFFLINE and not any(isinstance(path, str) for path in cached):
            HfApi().model_info(name, timeout=HUB_S)
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(f"model '{name}': there is no such folder, and the hub has no such model; {known}") from error
    except errors.HfHubHTTPError:
        return  # it answered; if it refuses the files, the download will say so
    except Exception as error:  # requests, httpx: no network, no name service, no certificate
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"model '{name}': no such folder, and the hub cannot be reached ({why}); {known}") from error


HUB_S = 10.0
"""Seconds that the hub may take to answer a first question."""
NO_BITSANDBYTES = "model.quantize=4bit needs bitsandbytes: pip install bitsandbytes, or set model.quantize=none"


def adapter_config(name: str, offline: bool = False) -> dict[str, Any] | None:
    """The adapter's configuration in a folder (or hub name); None for a whole model. `offline`: do not ask the hub."""
    from transformers.utils.peft_utils import find_adapter_config_file

    file = None
    try:
        path = local_path(name)
        if not offline and not Path(path).is_dir():
            _ask_hub(path)
        file = find_adapter_config_file(path, local_files_only=offline)
        config: dict[str, Any] | None = None if file is None else json.loads(Path(file).read_text())
    except OSError as error:  # also for what cannot be a hub's name: '-1', 'http://'
        raise UserError(f"model '{name}' is neither a folder nor a model of the Hugging Face hub: {error}") from error
    except ValueError as error:
        raise UserError(f"the adapter '{name}': {Path(str(file)).name} is not valid JSON ({error})") from error
    if config is not None and not config.get("base_model_name_or_path"):
        raise UserError(
            f"the adapter '{name}' does not name its base model; write it into {file} as base_model_name_or_path"
        )
    return config


def find_config(name: str, offline: bool = False) -> Any | None:
    """The configuration of a folder or hub name; for an adapter, its base model's. `offline`: do not ask the hub, and
    return None if it is not on this machine."""
    from transformers import AutoConfig

    while (adapter := adapter_config(name, offline)) is not None:
        name = adapter["base_model_name_or_path"]
    try:
        return AutoConfig.from_pretrained(local_path(name), local_files_only=offline)
    except (OSError, ValueError, KeyError) as error:
        if offline and isinstance(error, OSError):
            return None
        raise UserError(f"cannot read the configuration of '{name}': {' '.join(str(error).split())[:200]}") from None


def load_whole(name: str, dtype: str = "auto", device: str = "auto") -> tuple[Any, Any]:
    """As `load_local`, with an adapter merged into its base model: every weight is a plain tensor."""
    adapter = adapter_config(name)
    if adapter is None:
        return load_local(name, dtype, device)
    base, tokenizer = load_whole(adapter["base_model_name_or_path"], dtype, device)
    import peft

    try:
        module = peft.PeftModel.from_pretrained(base, local_path(name)).merge_and_unload()
    except DAMAGED as error:
        raise UserError(f"cannot load the adapter '{name}': {describe_damage(error)}") from error
    return module.eval().requires_grad_(True), own_tokenizer(name) or tokenizer


def own_tokenizer(name: str) -> Any:
    """The tokenizer that was saved with an adapter; None if there is only the base model's."""
    from transformers import AutoTokenizer

    path = Path(local_path(name))
    return AutoTokenizer.from_pretrained(path) if (path / "tokenizer_config.json").is_file() else None


def free_bytes(device: str) -> int:
    """Available bytes of the device; 0 on the CPU."""
    import torch

    place = torch.device(pick_device(device))
    return torch.cuda.mem_get_info(place)[0] + torch.cuda.memory_reserved(place) if place.type == "cuda" else 0


def shared_kv(device: Any, sharers: int) -> int:
    """Bytes for keys and values of each of several models: together a third of what is free; 0: the engine decides."""
    import torch

    if sharers < 2 or torch.device(device).type != "cuda":
        return 0
    return int(torch.cuda.mem_get_info(device)[0]) // (3 * sharers)


class BorrowedModel(GuardedModel):
    """A model with a different owner (the policy), counted under its own role; closing it does not close the
    owner's."""

    def __init__(self, spec: ModelSpec, model: Model | None, **guards: Unpack[Guards]) -> None:
        """`model`: None until a subclass has loaded it."""
        guards["limits"] = EndpointLimits(1_000_000)
        super().__init__(spec, **guards)
        self.inner = model
        if model is not None:
            self.name, self.abilities, self.no_schema = model.name, model.abilities, model.no_schema

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model behind this one."""
        return None if self.inner is None else self.inner.tokenizer

    @property
    def state_now(self) -> int:
        """The version of the model behind this one."""
        return 0 if self.inner is None else self.inner.state_now

    async def _attempt(self, request: Request, n: int, seed: int | None) -> ApiAnswer:
        if self.inner is None:
            raise UserError(f"model '{self.name}' is not started")
        of_n = replace(request, n=n)
        completions = await self.inner.generate(of_n if seed is None else of_n.with_seed(seed))
        prompt_tokens = completions[0].prompt_tokens if completions else 0
        return ApiAnswer(completions, prompt_tokens, sum(c.completion_tokens for c in completions))


class LocalModel(BorrowedModel):
    """A helper model in this process: loaded at `start()`, sampled in batches, released at `aclose()`."""

    def __init__(self, spec: ModelSpec, swap_slot: Any = None, **guards: Unpack[Guards]) -> None:
        from upshot.models.grammar import local_abilities, missing_library

        super().__init__(spec, None, **guards)
        self._swap_slot = swap_slot
        """Its place in a pool (`serving.swap.pool.PoolSlot`)."""
        self.sharers = 1
        """The number of models on one device without a memory plan, which share the memory for keys and values."""
        self.borrow: Callable[[ModelSpec], Awaitable[Model]] | None = None
        """Gets the model from another process that has loaded it; None: load it here."""
        self.abilities, self.no_schema = local_abilities(), missing_library()
        self._weights = ""

    @property
    def identity(self) -> str:
        """The folder and when it was written, because other weights at the same path are another model."""
        return f"{self.spec.label}@{self._weights}"

    async def start(self) -> None:
        """Load weights and tokenizer (once)."""
        await super().start()
        if self.inner is None:
            path = Path(local_path(self.spec.model))
            newest = max((f.stat().st_mtime_ns for f in path.iterdir()), default=0) if path.is_dir() else path
            self._weights = str(newest)
            self.inner = self._load_engine() if self.borrow is None else await self.borrow(self.spec)

    def _load_engine(self) -> Model:
        """An engine that samples at the same time as the policy."""
        from upshot.engine.engine import Engine, EngineSettings
        from upshot.models.engine_model import EngineModel
        from upshot.models.rendering import Renderer

        module, tokenizer = self._load()
        renderer = Renderer(tokenizer)
        if self._swap_slot is None:
            kv_bytes = int(self.spec.kv_gb * 2**30) or shared_kv(module.device, self.sharers)
        else:
            self._swap_slot.furnish(module)
            kv_bytes = self._swap_slot.kv_bytes
        settings = EngineSettings(own_stream=True, kv_bytes=kv_bytes, weights=self.spec.weights, kv=self.spec.kv)
        engine = Engine(module, renderer.end_ids, settings, self._swap_slot)
        if self._swap_slot is not None:
            self._swap_slot.engine = engine
        return EngineModel(engine, tokenizer, self.name, renderer)

    def _load(self) -> tuple[Any, Any]:
        """Module and tokenizer; for a place in a pool the module stays on the host."""
        if self._swap_slot is None:
            module, tokenizer = load_whole(self.spec.model, self.spec.dtype, self.spec.device)
        else:
            kind = pick_dtype(self.spec.dtype, str(self._swap_slot.arena.device))
            module, tokenizer = load_whole(self.spec.model, str(kind).removeprefix("torch."), "cpu")
        if self.spec.weights == "fp8":
            from upshot.engine.llama.eight_bit import narrow_projections

            narrow_projections(module)
        return module, tokenizer

    async def aclose(self) -> None:
        """Release the weights."""
        await super().aclose()
        inner, self.inner = self.inner, None
        if inner is not None:
            await inner.aclose()
        if self._swap_slot is not None:
            self._swap_slot.vacate()
