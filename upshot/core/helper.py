"""What a run opens once for all conversations and closes at its end: models, participants, futures, reward managers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Helper:
    """Holds connections, processes or memory, and counts."""

    async def aclose(self) -> None:
        """Cancel running work and release resources."""

    def stats(self) -> dict[str, float]:
        """Counters since the start, for the metrics."""
        return {}

    def state(self) -> dict[str, Any]:
        """What a run saves of it, to continue counting after a resume."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
