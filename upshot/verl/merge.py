"""verl's FSDP2 checkpoint → a Hugging Face folder: every weight whole and in the type in which it was trained.

It needs only torch: verl need not be installed, no process group is opened, and only the weights of one file are in
memory at a time. Adapters (LoRA) are written as adapters, without their base.

verl's own merger (`verl.model_merger`) is not used, because it rounds every weight to bfloat16 (so the export of a
float32 run would differ from the trained model), unpickles its input, holds the whole model in memory, and must be
installed where the export runs.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upshot.core.errors import UserError
from upshot.core.files import write_json

if TYPE_CHECKING:
    import torch

SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
FILE_BYTES = 5 * 2**30
"""Largest size of a safetensors file; the weights of one file are in memory at once."""
LORA = re.compile(r"(.*\.lora_(?:A|B|embedding_A|embedding_B))\.default(\.weight)?$")


def write_merged(shards: Path, to: Path, base: str) -> None:
    """Write the model in verl's folder of shards (`global_step_N/actor`) to a folder; `base`: what it started from.

    Config and tokenizer are those beside the shards, or else those already in the target folder.
    """
    ranks = read_shards(shards)
    beside = shards / "huggingface"
    for file in sorted(beside.iterdir()) if beside.is_dir() else ():
        if file.is_file() and file.suffix not in (".safetensors", ".bin") and not file.name.endswith(".index.json"):
            shutil.copy2(file, to / file.name)
    if any(LORA.match(name) for name in ranks[0]):
        _write_adapter(shards, ranks, to, base)
    else:
        _write_weights(ranks, to)


def world_size(shards: Path) -> int:
    """The number of ranks that saved a folder of shards."""
    matches = [match for path in shards.glob("model_world_size_*.pt") if (match := SHARD.fullmatch(path.name))]
    if not matches:
        raise UserError(f"'{shards}' has no FSDP shards (model_world_size_N_rank_M.pt)")
    size = int(matches[0][1])
    missing = set(range(size)) - {int(match[2]) for match in matches}
    if missing:
        raise UserError(f"'{shards}' lacks shards of ranks {sorted(missing)}: every node must save to the same storage")
    return size


def read_shards(shards: Path) -> list[Mapping[str, torch.Tensor]]:
    """The weights of every rank, mapped from their files instead of read."""
    import torch

    size = world_size(shards)
    paths = [shards / f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size)]
    # torch warns of meshes that were unpickled without process groups; none is needed to read them.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    with torch.serialization.safe_globals(_kinds()):
        return [torch.load(path, map_location="cpu", weights_only=True, mmap=True) for path in paths]


def join_parts(name: str, parts: Sequence[Any]) -> torch.Tensor:
    """One weight, joined from all ranks' parts."""
    import torch
    from torch.distributed.tensor import DTensor

    first = parts[0]
    if not isinstance(first, DTensor):
        if not isinstance(first, torch.Tensor):
            raise UserError(f"'{name}' is a {type(first).__name__}; only FSDP2 shards can be merged (strategy=fsdp2)")
        return first
    locals_ = {rank: part._local_tensor for rank, part in enumerate(parts)}
    out = _join(first.device_mesh.mesh, first.placements, locals_, name)
    if out.shape != first.shape:
        raise UserError(f"the parts of '{name}' make {list(out.shape)}, not {list(first.shape)}: shards do not match")
    return out.contiguous()


def _join(mesh: torch.Tensor, placements: Sequence[Any], parts: Mapping[int, Any], name: str) -> torch.Tensor:
    """Join the parts of a mesh of ranks, dimension by dimension: shards are concatenated, of copies one is taken."""
    import torch

    if not placements:
        return parts[int(mesh)]  # type: ignore[no-any-return]
    here, *inner = placements
    if here.is_replicate():
        return _join(mesh[0], inner, parts, name)
    if not here.is_shard() or type(here).__name__ != "Shard":
        raise UserError(f"'{name}' has an unsupported layout ({here}); merge it with verl's own model_merger")
    return torch.cat([_join(row, inner, parts, name) for row in mesh], dim=here.dim)


def _write_weights(ranks: Sequence[Mapping[str, Any]], to: Path) -> None:
    """All weights, in files of a bounded size, and a config.json that says their type."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    config = json.loads((to / "config.json").read_text())
    names = _list_untied(ranks, config)
    shapes = {name: torch.empty(ranks[0][name].shape, dtype=ranks[0][name].dtype, device="meta") for name in names}
    files = split_torch_state_dict_into_shards(shapes, max_shard_size=FILE_BYTES)
    for file, names_in_file in files.filename_to_tensors.items():
        tensors = {name: join_parts(name, [rank[name] for rank in ranks]).clone() for name in names_in_file}
        save_file(tensors, to / file, {"format": "pt"})
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        write_json(to / "model.safetensors.index.json", index)
    kinds = [ranks[0][name].dtype for name in names if ranks[0][name].is_floating_point()]
    config["dtype"] = str(max(set(kinds), key=kinds.count)).removeprefix("torch.")
    config.pop("torch_dtype", None)
    config.pop("attn_implementation", None)  # how it was trained, not what it is
    write_json(to / "config.json", config)


def _list_untied(ranks: Sequence[Mapping[str, Any]], config: dict[str, Any]) -> list[str]:
    """The names to write: a head that equals the embedding is left out; if it differs, the config says so."""
    import torch

    names, head, embedding = list(ranks[0]), "lm_head.weight", "model.embed_tokens.weight"
    if not config.get("tie_word_embeddings") or not {head, embedding} <= set(names):
        return names
    one, other = (join_parts(name, [rank[name] for rank in ranks]) for name in (head, embedding))
    if torch.equal(one, other):
        return [name for name in names if name != head]
    config["tie_word_embeddings"] = False
    return names


def _write_adapter(shards: Path, ranks: Sequence[Mapping[str, Any]], to: Path, base: str) -> None:
    """The adapters alone, as peft reads them."""
    from safetensors.torch import save_file

    lora = json.loads((shards / "lora_train_meta.json").read_text())
    adapters = {name: match for name in ranks[0] if (match := LORA.match(name))}
    parts = {m[1] + (m[2] or ""): [rank[name] for rank in ranks] for name, m in adapters.items()}
    tensors = {name: join_parts(name, of_ranks).clone() for name, of_ranks in parts.items()}
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in adapters})
    (to / "config.json").unlink(missing_ok=True)  # it describes the base, which is not in this folder
    save_file(tensors, to / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": lora["r"], "lora_alpha": lora["lora_alpha"], "task_type": lora["task_type"]}
    config |= {"target_modules": targets, "base_model_name_or_path": base, "bias": "none", "lora_dropout": 0.0}
    write_json(to / "adapter_config.json", config | {"inference_mode": True})


def _kinds() -> list[Any]:
    """What a file of shards may hold besides tensors."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import Partial

    return [DTensor, DTensorSpec, TensorMeta, DeviceMesh, Shard, Replicate, Partial, torch.Size]
