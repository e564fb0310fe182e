"""Which verifier a row of a mixed set goes to: its data source where one is known by it, else the mix's own label.

Dolci and OLMo mixes label rows in `dataset` (a name or a list of one), sometimes with the kind in front of the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from upshot.tasks.verifiers.base import verifiers

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
_LABELS = {label: verifier for verifier, labels in _TABLE.items() for label in labels.split()}
"""Labels of the Dolci and OLMo mixes, as `_spelling` writes them → verifiers."""


def route(record: Mapping[str, Any], fallback: str) -> str:
    """The verifier's name for a record."""
    value = record.get("data_source")
    source = value if isinstance(value, str) else ""
    if source in verifiers:
        return source
    known = {_spelling(name): name for name in verifiers.names()} if source else {}
    if _spelling(source) in known:
        return known[_spelling(source)]
    # A source that nobody knows is not made known by the ability: the classmate fork calls all of its rows math.
    keys = ("data_source", "dataset", "verifier", *(() if isinstance(value, str) else ("ability",)))
    columns = (record.get(key) or [] for key in keys)
    labels = (label for column in columns for label in ([column] if isinstance(column, str) else column))
    return next(filter(None, map(verifier_of_label, labels)), "") or fallback or source


def verifier_of_label(label: Any) -> str:
    """The verifier of a mix's label; '' where none is known."""
    return _LABELS.get(_spelling(str(label)), "")


def _spelling(name: str) -> str:
    """A name as all its spellings are: case and the kind of dash do not matter."""
    return name.lower().replace("_", "-")
