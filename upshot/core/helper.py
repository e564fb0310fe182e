"""What a run opens once for all conversations and closes at its end: models, participants, futures, reward managers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Helper:
    """Holds connections, processes or memory, and counts."""

    async def aclose(self) -> None:
        """Cancel what is under way and release what is held."""

    def stats(self) -> dict[str, float]:
        """Counters since the start, for the metrics."""
        return {}

    def state(self) -> dict[str, Any]:
        """What a run saves of it, to go on counting after a resume."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
