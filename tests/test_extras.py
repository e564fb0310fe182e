"""Every extra can be installed, alone and with the others; antlr and hydra once conflicted."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
LINES = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
PINS = {canonicalize_name(name): version for name, version in LINES}
TOGETHER = ",".join(sorted(set(EXTRAS) - {"vllm", "dev", "all"}))
"""vLLM pins its own PyTorch, so it is installed on the machine where it serves, not with the rest."""


def wanted(requirements: list[str]) -> dict[str, Requirement]:
    """The requirements by name, without the project's own extras."""
    others = [found for found in map(Requirement, requirements) if found.name != PROJECT["name"]]
    return {canonicalize_name(requirement.name): requirement for requirement in others}


def test_the_core_accepts_exactly_the_antlr_versions_that_parse_latex() -> None:
    antlr = wanted(PROJECT["dependencies"])["antlr4-python3-runtime"].specifier
    assert [v for v in ("4.9.3", "4.11.0", "4.11.1", "4.13.2") if v not in antlr] == []
    assert [v for v in ("4.9.2", "4.10", "4.12.0", "4.13.0", "4.13.1") if v in antlr] == []


def test_verl_brings_the_hydra_that_its_agent_loop_imports() -> None:
    hydra = wanted(EXTRAS["verl"])["hydra-core"].specifier
    assert "0.11.3" not in hydra and "1.3.2" in hydra


@pytest.mark.parametrize("part", ["core", *EXTRAS])
def test_the_pins_satisfy_the_projects_requirements(part: str) -> None:
    asked = wanted(PROJECT["dependencies"] if part == "core" else EXTRAS[part])
    pinned = {name: ask.specifier for name, ask in asked.items() if name in PINS}
    wrong = {name: PINS[name] for name, allowed in pinned.items() if Version(PINS[name]) not in allowed}
    assert wrong == {}
    assert part not in ("core", "dev") or not [name for name in asked if name not in PINS]


def test_the_extra_all_names_only_existing_extras() -> None:
    (whole,) = map(Requirement, EXTRAS["all"])
    assert whole.name == PROJECT["name"] and whole.extras <= set(EXTRAS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extras", [*EXTRAS, TOGETHER])
def test_pip_resolves(extras: str, tmp_path: Path) -> None:
    """Needs the package index; PyTorch is pinned, so that no build for another device is chosen."""
    chosen = resolve(extras, tmp_path)
    if "verl" in extras:
        assert Version(chosen["hydra-core"]) >= Version("1.3") and chosen["antlr4-python3-runtime"] == "4.9.3"
    if "vllm" not in extras:
        assert Version(chosen["torch"]).public == PINS["torch"]
        assert not [name for name in chosen if name.startswith("nvidia-")]


def resolve(extras: str, folder: Path) -> dict[str, str]:
    """What pip would install, by name; the test is skipped without an index."""
    pins = folder / "pins.txt"
    pins.write_text("" if extras == "vllm" else f"torch=={PINS['torch']}\n")
    report = folder / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["-c", str(pins), "--report", str(report), f"{ROOT}[{extras}]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=folder)
    if done.returncode and "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-2000:]
    installed: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in installed}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["4.9.3", "4.11.0", "4.13.2"])
def test_math_verdicts_are_the_same_with_every_antlr(version: str, tmp_path: Path) -> None:
    target = tmp_path / "antlr"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    got = subprocess.run([*pip, f"antlr4-python3-runtime=={version}"], capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"antlr {version} cannot be had: {got.stderr.strip().splitlines()[-1]}")
    paths = os.pathsep.join([str(target), str(ROOT)])
    tests = [sys.executable, "-m", "pytest", "-q", "tests/tasks/verifiers/test_mathematics.py"]
    done = subprocess.run(tests, env={**os.environ, "PYTHONPATH": paths}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
