"""A trained model as others take it: a checkpoint without what a resume needs, merged if asked, with a model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.core.whole_files import fill, place
from upshot.run.checkpoints import Checkpoint
from upshot.run.folder import RunFolder
from upshot.run.model_card import CARD, model_card, public_name

KEPT = (".safetensors", ".json", ".jinja", ".model", ".txt", ".py")
"""Endings of the files of a Hugging Face folder."""
OWN = ("state.json", "counters.json")


def export(folder: RunFolder, checkpoint: str = "", merge: bool = False, out: Path | None = None) -> Path:
    """Write a checkpoint of a run as a Hugging Face folder; where it lies."""
    found = find_checkpoint(folder, checkpoint)
    out = out or folder.path / f"export-{found.path.name}{'-merged' if merge else ''}"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"'{out}' is there already; remove it, or choose another place with --out")
    adapter = _adapter(found.path)

    def write(to: Path) -> None:
        if merge and adapter is not None:
            _merge(found.path, to)
        else:
            for file in sorted(found.path.iterdir()):
                if file.suffix in KEPT and file.name not in OWN:
                    shutil.copy2(file, to / file.name)
        base = None if adapter is None else str(adapter["base_model_name_or_path"])
        (to / CARD).write_text(model_card(folder, found, base, merged=merge), encoding="utf-8")

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".partial-{out.name}")
    try:
        fill(partial, write)
        place(partial, out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"cannot write '{out}': {error.strerror or error}") from error
    return out


def find_checkpoint(folder: RunFolder, wanted: str = "") -> Checkpoint:
    """A checkpoint by its step or name, 'best' or 'last'; '': the best one where one was kept, else the last."""
    saved = folder.checkpoints.saved()
    if not saved:
        raise UserError(f"'{folder.path}' has no checkpoint yet")
    best = folder.checkpoints.best()
    if wanted == "best" and best is None:
        raise UserError(f"'{folder.path}' kept no best checkpoint; set train.save.best, or choose a step")
    if wanted in ("", "best") and best is not None:
        wanted = best
    if wanted in ("", "last"):
        return saved[-1]
    for found in reversed(saved):
        if wanted in (found.path.name, str(found.step)):
            return found
    names = ", ".join(found.path.name for found in saved)
    raise UserError(f"'{folder.path}' has no checkpoint '{wanted}'; there are {names}")


def push(out: Path, name: str) -> str:
    """Upload a folder to the Hugging Face hub, into a private repository; its address."""
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise UserError("--push needs huggingface_hub: pip install huggingface_hub") from error
    if hub.get_token() is None:
        raise UserError(
            f"there is no token for the Hugging Face hub: run `hf auth login` or set HF_TOKEN; the folder is at '{out}'"
        )
    adapter = _adapter(out)
    if adapter is not None and not public_name(base := str(adapter["base_model_name_or_path"])):
        raise UserError(f"the adapter in '{out}' needs its base '{base}', which nobody else has; export with --merge")
    try:
        return upload(out, name)
    except (hub.errors.HfHubHTTPError, hub.errors.HFValidationError, OSError) as error:
        raise UserError(f"cannot push to '{name}': {str(error).splitlines()[0]}. The folder is at '{out}'") from error


def upload(out: Path, name: str) -> str:
    """The upload itself."""
    import huggingface_hub as hub

    api = hub.HfApi()
    address = api.create_repo(name, private=True, exist_ok=True)
    api.upload_folder(repo_id=name, folder_path=out, commit_message="upload by upshot export")
    return str(address)


def _adapter(path: Path) -> dict[str, Any] | None:
    file = path / "adapter_config.json"
    return json.loads(file.read_text()) if file.is_file() else None


def _merge(checkpoint: Path, to: Path) -> None:
    """The adapter in its base model: added in float32 and rounded once, to the base's own type."""
    from transformers import AutoConfig

    from upshot.models.local import adapter_config, load_whole, local_path

    base = str(checkpoint)
    while (found := adapter_config(base)) is not None:
        base = found["base_model_name_or_path"]
    kind = getattr(AutoConfig.from_pretrained(local_path(base)), "dtype", None)
    module, tokenizer = load_whole(str(checkpoint), "float32", "cpu")
    if kind is not None:
        module = module.to(kind)
    module.save_pretrained(to)
    tokenizer.save_pretrained(to)
