"""A sandbox that starts when the first program is to be run, so that runs without programs start none."""

from __future__ import annotations

from typing import Any


class LazySandbox:
    """Stands for the sandbox that a spec ('local', or a server's URL) names."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._runner: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._runner is None:
            from upshot.sandbox import connect

            self._runner = connect(self.spec)
        return getattr(self._runner, name)

    async def aclose(self) -> None:
        """Stop the sandbox if it was started."""
        if self._runner is not None:
            await self._runner.aclose()
