"""What a run opens once for all conversations and closes at its end: models, participants, futures, reward managers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Helper:
    """Holds connections, processes or memory, and has counters."""

    has_counted: bool = False
    """Whether it has anything to report; if not, it is not asked after each step."""

    def __init_subclass__(cls, **options: Any) -> None:
        """A class that defines `stats` or `state` is asked for its counters."""
        super().__init_subclass__(**options)
        cls.has_counted = cls.has_counted or not {"stats", "state"}.isdisjoint(vars(cls))

    async def aclose(self) -> None:
        """Cancel running work and release resources."""

    def stats(self) -> dict[str, float]:
        """Counters since the start, for the metrics."""
        return {}

    def state(self) -> dict[str, Any]:
        """The counters that a run saves, to continue counting after a resume."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
