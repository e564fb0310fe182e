"""The wheel contains everything that an installed Upshot reads: pages, templates, prompts, recipes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")
WRITTEN_BY_RUNS = ("__pycache__", ".upshot-profiles")
"""Files beside the sources after tests or runs; git ignores them, too."""


def test_the_wheel_contains_every_file_of_the_package_and_the_recipes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in ("upshot", "recipes"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns(*WRITTEN_BY_RUNS))
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    done = subprocess.run([*build, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("upshot_rl-*.whl")
    packed = {name.partition(".data/data/share/upshot/")[2] or name for name in zipfile.ZipFile(wheel).namelist()}
    expected = {str(path.relative_to(ROOT)) for folder in ("upshot", "recipes") for path in (ROOT / folder).rglob("*")}
    ours = {name for name in expected if (ROOT / name).is_file() and not set(WRITTEN_BY_RUNS) & set(Path(name).parts)}
    missing = ours - packed
    assert missing == set()
    assert {name.partition("/")[0] for name in packed if ".dist-info/" not in name} == {"upshot", "recipes"}
