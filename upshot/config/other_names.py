"""What other projects call our keys and values (other_names.yaml): such a word is refused with ours in the message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_TABLE = yaml.safe_load((Path(__file__).parent / "other_names.yaml").read_text("utf-8"))


def _by_word(names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {word: ours for ours, words in names.items() for word in words}


FOREIGN_KEYS = _by_word(_TABLE["keys"])
"""Word → our dotted key."""
FOREIGN_VALUES = {key: _by_word(values) for key, values in _TABLE["values"].items()}
"""For a key of ours: value → what to set here."""


LATE = ("warm_start.", "eval.", "budget.", "models.")
"""Keys of the run itself come before keys of these sections; then by how deep they are."""


def translate_value(key: str, value: Any) -> str:
    """What to set here for a value of another project; empty where the value is unknown."""
    return FOREIGN_VALUES.get(key, {}).get(str(value).lower(), "")


def translate_key(word: str, value: Any, known: Iterable[str]) -> str:
    """The tail of an error about an unknown key: where it is here; empty where that is unknown.

    word: what was written, without its section. known: all dotted keys. A key of another section is found by its name.
    """
    alike = (key for key in known if key.rpartition(".")[2] == word)
    translation = FOREIGN_KEYS.get(word.lower())
    nearest = sorted(alike, key=lambda key: (key.startswith(LATE), key.count("."), key))
    places = [translation] if translation else nearest
    if not places:
        return ""
    return f"here it is {translate_value(places[0], value) or ' or '.join(places[:3])}"
