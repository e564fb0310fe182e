"""A text environment with long episodes: an archive with one page per turn, each of which names one box."""

from __future__ import annotations

import random
from typing import Any

BOXES = "amber birch coral delta ember fjord grove heron"
FILLER = "the river ran past old stone walls and a quiet road led over hills to small farms near woods by the sea"


class Archive:
    """Every turn shows a page of `words` words; the right answer is the box that the page names."""

    def __init__(self, pages: int = 10, words: int = 1200) -> None:
        self.pages, self.words = pages, words

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """The first page."""
        self.rng, self.number = random.Random(seed), 0
        return self._page(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """An answer, worth its share of 1 if it names the box; then the next page."""
        reward = (self.box in action.lower().split()[:3]) / self.pages
        self.number += 1
        done = self.number == self.pages
        return "" if done else self._page(), reward, done, False, {}

    def _page(self) -> str:
        self.box = self.rng.choice(BOXES.split())
        filler = self.rng.choices(FILLER.split(), k=self.words)
        filler.insert(self.rng.randrange(len(filler)), f"box {self.box} .")
        return f"page : {' '.join(filler)} . which box ?"
