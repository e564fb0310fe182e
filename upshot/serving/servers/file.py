"""The serve file: what `upshot serve FILE.yaml` may say.

host: 127.0.0.1
servers:
  user: {model: Qwen/Qwen3-8B, engine: vllm, devices: [0], memory: 0.5, arguments: [--max-model-len, 8192]}
  judge: {model: Qwen/Qwen3-4B, engine: vllm, devices: [0], memory: 0.3, port: 8002}
  peer: smollm2-135m
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from upshot.config.bools import PlainNumbers
from upshot.config.load import read_yaml
from upshot.config.recipe import Text
from upshot.config.validation import explain_error
from upshot.core.errors import UserError
from upshot.core.http_server import demand_key

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""A server's name is part of a file name and of `serve:NAME`."""
OWN = {
    "--host": "host",
    "--port": "port",
    "--name": "the server's name",
    "--served-model-name": "the server's name",
    "--api-key": "api_key_env",
    "--device": "devices",
    "--tensor-parallel-size": "devices",
    "-tp": "devices",
    "--memory": "memory",
    "--gpu-memory-utilization": "memory",
}
"""Arguments of the engines that are set by a key of the serve file instead."""


class ServerConfig(PlainNumbers):
    """One model server."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    model: str
    """A Hugging Face folder (relative to the file) or name, or smollm2-135m."""
    engine: Literal["upshot", "vllm"] = "upshot"
    """upshot: the embedded engine, in its own process. vllm: `vllm serve`, which must be installed."""
    devices: Literal["auto", "cpu"] | list[int] = "auto"
    """GPUs by number, among the visible ones; several: the model is split over them (vllm only). auto: the first GPU,
    or else the CPU."""
    memory: float | None = Field(None, gt=0, le=1)
    """Share of each device's memory; None: an equal part of what the other servers leave of 0.9."""
    port: int | Literal["auto"] = "auto"
    """auto: a free port, which stays the same over restarts."""
    replicas: int = Field(1, ge=1, le=256)
    """Number of processes: NAME-1, NAME-2 …, on consecutive ports, each with its part of the devices. `serve:NAME`
    means all of them."""
    arguments: list[Text] = Field(default_factory=list)
    """Further arguments of the engine's command line."""
    environment: dict[str, Text] = Field(default_factory=dict)
    """Further environment variables."""
    program: str = "vllm"
    """vllm only: the program, such as /opt/vllm/bin/vllm."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value

    @field_validator("port")
    @classmethod
    def _check_port(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 0 < value < 2**16:
            raise ValueError("give a number from 1 to 65535, or auto")
        return value

    @model_validator(mode="after")
    def _check_fit(self) -> ServerConfig:
        if isinstance(self.port, int) and self.port + self.replicas > 2**16:
            raise ValueError(f"port {self.port} leaves no room for {self.replicas} consecutive ports; give a lower one")
        for word in self.arguments:
            if word.partition("=")[0] in OWN:
                raise ValueError(f"arguments: '{word}' is set by the key '{OWN[word.partition('=')[0]]}'")
        if isinstance(self.devices, list):
            if not self.devices or min(self.devices) < 0 or len(set(self.devices)) < len(self.devices):
                raise ValueError(f"devices {self.devices}: name GPUs once each, from 0; or cpu")
            if len(self.devices) > 1 and len(self.devices) % self.replicas:
                raise ValueError(f"devices {self.devices} cannot be divided among {self.replicas} replicas")
            if self.engine == "upshot" and len(self.devices) > self.replicas:
                raise ValueError(
                    f"devices {self.devices}: the upshot engine takes one GPU; engine: vllm splits a model, "
                    "`replicas` takes one each"
                )
        if self.devices == "cpu" and self.memory is not None:
            raise ValueError("memory is a share of a GPU, but devices is cpu; leave it out")
        if self.engine == "upshot" and self.program != "vllm":
            raise ValueError(f"program '{self.program}' has no effect with the upshot engine, only with engine: vllm")
        return self

    def split_replicas(self) -> list[ServerConfig]:
        """The settings of each process."""
        processes = []
        for i in range(self.replicas):
            devices, port = self.devices, self.port
            if isinstance(devices, list) and len(devices) > 1:
                each = len(devices) // self.replicas
                devices = devices[i * each : (i + 1) * each]
            if isinstance(port, int):
                port += i
            processes.append(self.model_copy(update={"replicas": 1, "devices": devices, "port": port}))
        return processes


class ServersConfig(PlainNumbers):
    """A set of model servers."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    servers: dict[str, ServerConfig] = Field(min_length=1)
    """By name, which is also the name that clients request. After the check: one entry per process."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs a key."""
    api_key_env: str = "UPSHOT_API_KEY"
    """Environment variable with the key that clients must send; if it is not set, no key, on loopback only."""
    start_s: float = Field(900.0, gt=0)
    """Time limit until a server answers, in seconds."""
    hung_s: float = Field(300.0, gt=0)
    """Seconds without an answer to /health after which a server is restarted."""
    _asked_as: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("servers")
    @classmethod
    def _check_names(cls, value: dict[str, ServerConfig]) -> dict[str, ServerConfig]:
        for name in value:
            if not NAME.fullmatch(name):
                raise ValueError(f"'{name}' is not a valid server name; use letters, digits, '.', '_' and '-'")
        return value

    @model_validator(mode="after")
    def _split_into_processes(self) -> ServersConfig:
        """Replace servers by their processes."""
        servers_by_name: dict[str, ServerConfig] = {}
        for name, server in self.servers.items():
            for i, process in enumerate(server.split_replicas(), 1):
                replica = name if server.replicas == 1 else f"{name}-{i}"
                if replica in servers_by_name:
                    raise ValueError(f"servers.{replica}: a replica has the same name; rename one of them")
                servers_by_name[replica], self._asked_as[replica] = process, name
        ports = [server.port for server in servers_by_name.values() if server.port != "auto"]
        for port in ports:
            if ports.count(port) > 1:
                raise ValueError(f"port {port} is given to two servers; give each its own, or auto")
        self.servers = servers_by_name
        return self

    def asked_as(self, process: str) -> str:
        """The name that clients of a process request: the name of its server, which replicas share."""
        return self._asked_as[process]

    @property
    def key(self) -> str:
        """The key that clients must send; empty: none."""
        return os.environ.get(self.api_key_env, "")


def read(path: str | Path) -> ServersConfig:
    """A checked serve file; model folders beside it are made absolute."""
    file = Path(path).expanduser()
    data = read_yaml(file, "serve file")
    if not isinstance(data, dict):
        raise UserError(f"serve file '{path}': a mapping with `servers` is needed, not {type(data).__name__}")
    try:
        servers = ServersConfig.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{path}: {explain_error(error, ServersConfig)}") from None
    demand_key(servers.host, servers.key, f"set the environment variable {servers.api_key_env}", f"{path}: host")
    for server in servers.servers.values():
        folder = file.resolve().parent / Path(server.model).expanduser()
        if (folder / "config.json").is_file():
            server.model = str(folder)
    return servers


def digest(path: str | Path) -> str:
    """A hash of the file's content, which shows whether running servers were started from the same text."""
    return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()[:16]
