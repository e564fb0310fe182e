"""Third-party clients and agent loops with the servers of `upshot serve FILE.yaml`. Run by `make test-peers`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.peers.parrot import FAMILIES, save_parrot
from tests.serving.servers.started import Started

ROOT = Path(__file__).parent.parent.parent
PYTHON = os.environ.get("UPSHOT_PEERS", sys.executable)
"""An environment with the clients."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file that lists a server for each family of tool calls."""
    folder = tmp_path_factory.mktemp("served")
    for family in FAMILIES:
        save_parrot(folder / family, family)
    file = folder / "servers.yaml"
    file.write_text(json.dumps({"servers": {family: {"model": family, "devices": "cpu"} for family in FAMILIES}}))
    started = Started(file, UPSHOT_API_KEY="secret")
    try:
        found = {name: {"url": s["url"], "folder": s["model"]} for name, s in started.ready()["servers"].items()}
        (folder / "found.json").write_text(json.dumps(found))
        yield folder / "found.json"
    finally:
        started.end()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", ["openai", "litellm", "lm_eval", "agents", "pydantic_ai", "smolagents"])
def test_a_client_works_against_the_servers_of_a_file(client: str, servers: Path) -> None:
    if subprocess.run([PYTHON, "-c", f"import importlib.util as u; assert u.find_spec('{client}')"]).returncode:
        pytest.skip(f"{PYTHON} has no {client}; `make test-peers` has")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "UPSHOT_API_KEY": "secret", "HF_HUB_OFFLINE": "1"}
    command = [PYTHON, "-m", "tests.peers.clients", client, str(servers)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
