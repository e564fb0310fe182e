"""The classmate map of a fleet, as `participants/classmate_map.py` reads it: keyed by model."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.core.files import write_atomic
from upshot.serving.servers.file import ServersConfig


def check_map(fleet: ServersConfig) -> None:
    """Refuse a map in which two servers would have one key."""
    seen: dict[str, str] = {}
    for name, server in fleet.servers.items():
        if server.model in seen:
            raise UserError(
                f"--map: '{seen[server.model]}' and '{name}' both serve {server.model}, and a map is keyed by model; "
                "name them in the recipe as serve:NAME instead"
            )
        seen[server.model] = name


def write_map(path: Path, fleet: ServersConfig, servers: Mapping[str, tuple[int, str]]) -> None:
    """Write the map of servers by name → (port, status)."""
    anywhere = fleet.host in ("0.0.0.0", "::")
    entries: dict[str, dict[str, Any]] = {}
    for index, (name, (port, status)) in enumerate(servers.items()):
        entries[fleet.servers[name].model] = {
            "outward_host": socket.gethostname() if anywhere else fleet.host,
            "local_host": fleet.host,
            "port": port,
            "served_model_name": fleet.asked_as(name),
            "model_index": index,
            "status": status,
            **({"api_key_env": fleet.api_key_env} if fleet.key else {}),
        }
    write_atomic(path, (json.dumps(entries, indent=2) + "\n").encode())
