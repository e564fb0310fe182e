"""Bold formatting, by rule: whether a response uses **bold** text."""

from __future__ import annotations

import re
from typing import Any

from upshot.core.score import Score
from upshot.tasks.verifiers.base import Extra, Verifier, verifiers

_BOLD = re.compile(r"\*\*(?=\S)[^*\n]{1,500}(?<=\S)\*\*|__(?=\S)[^_\n]{1,500}(?<=\S)__|<b>[^<\n]{1,500}</b>")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


@verifiers.register("bold-formatting", "bold_formatting")
class BoldFormatting(Verifier):
    """1 when something outside code is set in bold, else 0."""

    needs = ()
    verdict_on = "whether anything in the final answer is set in bold type"

    def score(self, response: str, reference: Any, extra: Extra) -> Score:
        """The verdict, with the number of bold parts in the detail."""
        found = _BOLD.findall(_CODE.sub("", response[:200_000]))
        return Score(float(bool(found)), detail={"bold": len(found)})
