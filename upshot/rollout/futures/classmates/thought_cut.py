"""How much of a thought is handed on. Pure functions.

`1`: all of it. A share r: its first max(1, int(n·r)) tokens. `first-K-tokens`, `last-K-tokens`. [low, high]: a share
drawn for each reply from its own random stream.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from upshot.core.errors import UserError

_TOKENS = re.compile(r"(first|last)-(\d+)-tokens")


@dataclass(frozen=True, slots=True)
class ThoughtCut:
    """Which tokens of a thought are kept."""

    low: float = 1.0
    high: float = 1.0
    """A share drawn between the two; equal: just that share."""
    first: int = 0
    """When set: so many tokens from the beginning."""
    last: int = 0
    """When set: so many tokens from the end."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        """A recipe's spec is read where the options of futures are checked."""
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(lambda spec: cls.parse(spec, "futures.keep"))

    @classmethod
    def parse(cls, spec: Any, where: str = "keep") -> ThoughtCut:
        """A keep spec of a recipe."""
        if isinstance(spec, ThoughtCut):
            return spec
        if isinstance(spec, int | float) and not isinstance(spec, bool) and 0 < spec <= 1:
            return cls(float(spec), float(spec))
        if isinstance(spec, list | tuple) and len(spec) == 2 and 0 < spec[0] <= spec[1] <= 1:
            return cls(float(spec[0]), float(spec[1]))
        found = _TOKENS.fullmatch(spec) if isinstance(spec, str) else None
        if found and int(found[2]) > 0:
            return cls(first=int(found[2])) if found[1] == "first" else cls(last=int(found[2]))
        raise UserError(
            f"{where} is {spec!r}; give a share above 0 and up to 1, [low, high], 'first-K-tokens' or 'last-K-tokens'"
        )

    def span(self, start: int, stop: int, rng: random.Random) -> tuple[int, int]:
        """The kept tokens of the thought [start, stop); empty only when the thought is."""
        length = stop - start
        if length <= 0:
            return start, start
        if self.last:
            return stop - min(self.last, length), stop
        share = self.low if self.low == self.high else rng.uniform(self.low, self.high)
        return start, start + min(self.first or max(1, int(length * share)), length)
