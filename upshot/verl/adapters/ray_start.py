"""Makes a Ray that is started here come up on a slow machine, too.

A raylet waits 15 seconds for the ports that its agents choose and write down, and then dies; no setting changes that
(ray-project/ray#65983). So the ports are chosen and written down before it starts.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from typing import Any

from ray._private.node import Node
from ray._raylet import (
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)

PORTS = {
    "metrics_agent_port": METRICS_AGENT_PORT_NAME,
    "metrics_export_port": METRICS_EXPORT_PORT_NAME,
    "dashboard_agent_listen_port": DASHBOARD_AGENT_LISTEN_PORT_NAME,
    "runtime_env_agent_port": RUNTIME_ENV_AGENT_PORT_NAME,
}
"""The name of an agent's port among Ray's parameters, and the file it is written to."""
LOW, HIGH = 20000, 32000
"""Below the ports that systems assign and above those of Ray's workers, so that nobody takes one before its agent."""


class PatientNode(Node):  # type: ignore[misc]
    """A Ray node whose raylet does not wait for its agents."""

    def start_raylet(self, *args: Any, **more: Any) -> None:
        """Start it; given ports are kept."""
        free = (port for port in random.sample(range(LOW, HIGH), 64) if _is_free(port))
        for name, file in PORTS.items():
            port = getattr(self._ray_params, name) or next(free)
            setattr(self._ray_params, name, port)
            persist_port(self._session_dir, self._node_id, file, port)
        super().start_raylet(*args, **more)


def be_patient() -> None:
    """From now on the nodes that this process starts are patient."""
    import ray._private.node as module

    module.Node = PatientNode


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("", port))
        return True
    return False
