"""The classmate map: a JSON or YAML file of served models, keyed by model name.

{"Qwen/Qwen3-0.6B": {"outward_host": "node7", "local_host": "0.0.0.0", "port": 8001,
                     "served_model_name": "qwen", "model_index": 0, "status": "running"}}

Several processes of one model on that host: `"ports": [8001, 8002]` besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from upshot.config.bools import PlainNumbers
from upshot.config.bounds import NonNegative
from upshot.config.load import read_yaml
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import FuturesConfig
from upshot.config.validation import check_value
from upshot.core.errors import UserError
from upshot.rollout.futures.classmates.options import ClassmateConfig

UP = ("", "running", "ready", "up", "ok", "healthy", "serving")


class MapEntry(PlainNumbers):
    """One entry of the map."""

    model_config = ConfigDict(extra="ignore")  # other tools may keep more in it

    port: int = Field(ge=1, le=65535)
    ports: list[int] = Field(default_factory=list)
    """Of all its replicas, where there are several."""
    outward_host: str = ""
    local_host: str = ""
    served_model_name: str = ""
    model_index: int = 0
    status: str = ""
    weight: NonNegative = 1.0
    tokenizer: str = ""
    """Folder or Hub name of its tokenizer; '': the name of the entry."""
    api_key_env: str | None = None
    """Environment variable with the key that the server asks for."""

    def urls(self) -> list[str]:
        """Where it is reached: by its outward name, else on this machine."""
        host = self.outward_host or self.local_host or "127.0.0.1"
        host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        return [f"http://{host}:{port}/v1" for port in self.ports or [self.port]]


def read_map(path: str) -> tuple[dict[str, ModelSpec], list[ClassmateConfig]]:
    """Models by name, and the classmates they are, in the order of their index."""
    specs: dict[str, ModelSpec] = {}
    classmates: list[ClassmateConfig] = []
    where = f"classmate map '{path}'"
    entries = {str(name): check_value(f"{where}: {name}", data, MapEntry) for name, data in _load(path).items()}
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].model_index, item[0])):
        if entry.status.lower() not in UP:
            raise UserError(f"{where}: '{name}' is {entry.status!r}; start it, or take it out")
        key = {"api_key_env": entry.api_key_env} if entry.api_key_env else {}
        specs[name] = ModelSpec.parse({"url": entry.urls(), "model": entry.served_model_name or name, **key})
        classmates.append(ClassmateConfig(name=name, weight=entry.weight, tokenizer=entry.tokenizer or name))
    if not classmates:
        raise UserError(f"{where} names no model")
    return specs, classmates


def _load(path: str) -> Mapping[str, Any]:
    data = read_yaml(Path(path).expanduser(), "classmate map")  # JSON is YAML
    if not isinstance(data, Mapping):
        raise UserError(f"the classmate map '{path}' should be a mapping of model names, not {type(data).__name__}")
    return data


def classmate_names(futures: FuturesConfig) -> list[str]:
    """The classmates that a recipe names, in it or in a map; none where there are no such futures."""
    if futures.map_file is not None:
        return [classmate.name for classmate in read_map(futures.map_file)[1]]
    named = futures.options.get("classmates") or []
    return [str(entry["name"] if isinstance(entry, Mapping) else entry) for entry in named]
