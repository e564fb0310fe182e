"""The languages other than Python: how each is compiled and run, and whether this machine has it."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from upshot.core.errors import UserError


@dataclass(frozen=True)
class Language:
    """One language's commands; {tool} is the toolchain found on this machine."""

    name: str
    tool: str
    source: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
LANGUAGES: dict[str, Language] = {name: Language(name, **entry) for name, entry in _TABLE.items()}
ALIASES = {alias: language.name for language in LANGUAGES.values() for alias in language.aliases}
ALIASES |= dict.fromkeys(("py", "python3", "py3", "pypy", "pypy3"), "python")


def canonical(name: str) -> str:
    """The language's own name."""
    lowered = name.strip().lower()
    return ALIASES.get(lowered, lowered)


def find_obstacle(name: str) -> str:
    """Why a language cannot be run on this machine; '' if it can."""
    try:
        if canonical(name) != "python":
            find(name)
    except UserError as error:
        return str(error)
    return ""


@functools.cache
def toolchain(name: str) -> tuple[str, tuple[str, ...]] | None:
    """The tool's path and the directories it needs besides the system's; None if it is not installed."""
    path = shutil.which(LANGUAGES[name].tool)
    if path is None:
        return None
    if name == "rust":
        # A rustup proxy needs its home; the toolchain behind it does not.
        done = subprocess.run([path, "--print", "sysroot"], capture_output=True, text=True, timeout=30, check=False)
        root = done.stdout.strip()
        return (f"{root}/bin/rustc", (root,)) if done.returncode == 0 and root else None
    real = Path(path).resolve()
    outside = not str(real).startswith(("/usr/", "/bin/", "/lib"))
    return str(real if outside else path), ((str(real.parents[1]),) if outside else ())


def list_installed() -> list[str]:
    """The languages this machine can run."""
    return ["python", *(name for name in LANGUAGES if toolchain(name) is not None)]


def find(name: str) -> tuple[Language, str]:
    """A language and its tool; `UserError` if there is none."""
    language = LANGUAGES.get(canonical(name))
    if language is None:
        raise UserError(f"language '{name}' is not known; known: {', '.join(['python', *LANGUAGES])}")
    tool = toolchain(language.name)
    if tool is None:
        others = ", ".join(list_installed())
        raise UserError(f"language '{name}' needs {language.tool}, which is not installed here; installed: {others}")
    return language, tool[0]


def extra_paths() -> tuple[str, ...]:
    """The directories outside the system's that installed toolchains need."""
    tools = [toolchain(name) for name in LANGUAGES]
    return tuple(sorted({path for tool in tools if tool is not None for path in tool[1]}))
