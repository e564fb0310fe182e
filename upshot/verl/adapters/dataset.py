"""The rows of a run as verl's dataset (`data.custom_cls`): only their ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset


class RowIds(Dataset[dict[str, Any]]):
    """Reads what `rows.write_rows` has written."""

    def __init__(self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1):
        self.records: list[dict[str, Any]] = json.loads(Path(str(data_files)).read_text())

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.records[index])
