"""The compose file and its example match what the commands accept."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from upshot.cli import make_parser
from upshot.serving.servers.file import read

ROOT = Path(__file__).parents[3]
SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_the_commands_of_the_compose_file_exist(name: str) -> None:
    service = SERVICES[name]
    check = service.get("healthcheck", {}).get("test", ["CMD", "upshot"])[2:]
    for words in filter(None, [service["command"], check]):
        make_parser(words[:1]).parse_args(words)


def test_the_example_listens_where_the_compose_file_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSHOT_API_KEY", "secret")
    started = read(ROOT / "examples" / "servers" / "servers.yaml")
    published = [text.rpartition(":")[2] for text in SERVICES["models"]["ports"]]
    assert published == [str(server.port) for server in started.servers.values()]
    assert started.host == "0.0.0.0"


def test_the_image_copies_files_that_its_context_has() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [line.split()[1:-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    assert {name for names in copied for name in names} == kept
    assert all((ROOT / name).exists() for name in kept)
