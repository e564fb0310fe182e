"""The classmate map: a JSON or YAML file of served models, keyed by model name.

{"Qwen/Qwen3-0.6B": {"outward_host": "node7", "local_host": "0.0.0.0", "port": 8001,
                     "served_model_name": "qwen", "model_index": 0, "status": "running"}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import FuturesConfig
from upshot.core.errors import UserError
from upshot.rollout.futures.classmates.classmate import ClassmateConfig

UP = ("", "running", "ready", "up", "ok", "healthy", "serving")


class MapEntry(BaseModel):
    """One entry of the map."""

    model_config = ConfigDict(extra="ignore")  # other tools may keep more in it

    port: int
    outward_host: str = ""
    local_host: str = ""
    served_model_name: str = ""
    model_index: int = 0
    status: str = ""
    weight: float = 1.0
    tokenizer: str = ""
    """Folder or Hub name of its tokenizer; '': the name of the entry."""
    api_key_env: str | None = None
    """Environment variable with the key that the server asks for."""

    def url(self) -> str:
        """Where it is reached: by its outward name, else on this machine."""
        host = self.outward_host or self.local_host or "127.0.0.1"
        return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{self.port}/v1"


def read_map(path: str) -> tuple[dict[str, ModelSpec], list[ClassmateConfig]]:
    """Models by name, and the classmates they are, in the order of their index."""
    specs: dict[str, ModelSpec] = {}
    classmates: list[ClassmateConfig] = []
    entries = {str(name): _parse_entry(path, str(name), given) for name, given in _load(path).items()}
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].model_index, item[0])):
        if entry.status.lower() not in UP:
            raise UserError(f"classmate map '{path}': '{name}' is {entry.status!r}; start it, or take it out")
        key = {"api_key_env": entry.api_key_env} if entry.api_key_env else {}
        specs[name] = ModelSpec.parse({"url": entry.url(), "model": entry.served_model_name or name, **key})
        classmates.append(ClassmateConfig(name=name, weight=entry.weight, tokenizer=entry.tokenizer or name))
    if not classmates:
        raise UserError(f"classmate map '{path}' names no model")
    return specs, classmates


def _load(path: str) -> Mapping[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the classmate map '{path}': {error}") from error
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise UserError(f"the classmate map '{path}' is neither JSON nor YAML: {problem}") from error
    if not isinstance(data, Mapping):
        raise UserError(f"the classmate map '{path}' should be a mapping of model names, not {type(data).__name__}")
    return data


def _parse_entry(path: str, name: str, given: Any) -> MapEntry:
    try:
        return MapEntry.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "entry"
        raise UserError(f"classmate map '{path}': '{name}': {field}: {first['msg']}") from error


def classmate_names(futures: FuturesConfig) -> list[str]:
    """The classmates that a recipe names, in it or in a map; none where there are no such futures."""
    if futures.map_file is not None:
        return [classmate.name for classmate in read_map(futures.map_file)[1]]
    named = futures.options.get("classmates") or []
    return [str(entry["name"] if isinstance(entry, Mapping) else entry) for entry in named]
