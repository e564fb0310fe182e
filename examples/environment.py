"""A text environment in Gymnasium's form: a store room, where the policy learns what is kept in which corner."""

from __future__ import annotations

import random
from typing import Any

PLACES = {"lamp": "cellar", "chair": "attic", "bowl": "kitchen", "coat": "hall"}


class StoreRoom:
    """`reset` says what to fetch; the first word of a `step` says where to look; there are two attempts."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """What to fetch."""
        self.thing = random.Random(seed).choice(sorted(PLACES))
        self.looks = 0
        return f"fetch the {self.thing}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Look once: finding it scores 1 at the first attempt, a half at the second."""
        self.looks += 1
        found = action.split()[:1] == [PLACES[self.thing]]
        return "here it is" if found else "not here", found / self.looks, found, self.looks == 2, {}
