"""The table of what is called what (`table.yaml`): looked up, and printed as docs/migrate.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "table.yaml"
ORIGINALS = ("collabllm", "verl", "classmate")
HEAD = """# Coming from the originals

<!-- Made from upshot/offline/migrate/table.yaml: python -m upshot.offline.migrate.table > docs/migrate.md -->

`upshot recipe import THEIRS.yaml` (or `THEIRS.sh`) turns a config or a launch script of any of the three into a recipe
and lists what it could not carry, with the reason; a script of `scripts.engine.build_dataset` becomes the line of
`upshot data build` that does the same:

    upshot recipe import build.sh --out build_ours.sh
    upshot recipe import train_rl_collabllm.sh collabllm_interaction_config.yaml --out mine.yaml
    upshot train mine.yaml --dry-run

Their files are read as they are. `python -m tests.peers.collabllm_original` runs the original's session, reward,
builder and converters against `upshot serve`.

Where numbers differ on purpose: BLEU is of words (NLTK was given strings, which are characters); train and validation
share no goal (rows were split, so that turns of one conversation landed in both); `pass_rate` is the share of the
tests passed (1 or 0 there); `token_amount` counts single tokens of the policy's tokenizer (thousands of another
tokenizer's, or words, there); a failed judge is missing, not 0; the last assistant turn is judged with the rest.
"""


@dataclass(frozen=True)
class MappingLine:
    """One thing of an original and what it is here: a recipe key, a command, a metric, or a reason why not."""

    theirs: str
    kind: str
    key: str = ""
    how: str = ""
    """The conversion of its value; '' takes it as it is."""
    command: str = ""
    metric: str = ""
    reason: str = ""
    note: str = ""

    @property
    def ours(self) -> str:
        """What it is here, for the page."""
        if self.reason:
            return f"*on purpose not*: {self.reason}"
        return f"`{self.key or self.command or self.metric}`"


@dataclass(frozen=True)
class Original:
    """One of the originals with its lines."""

    title: str
    origin: str
    lines: tuple[MappingLine, ...]

    def find(self, name: str, kinds: Sequence[str] = ("flag", "key")) -> MappingLine | None:
        """The line of a flag or key: its own, else the longest pattern that fits."""
        fits = [line for line in self.lines if line.kind in kinds and fnmatchcase(name, line.theirs)]
        return max(fits, key=lambda line: (line.theirs == name, len(line.theirs)), default=None)


@cache
def originals() -> dict[str, Original]:
    """All originals by name."""
    import yaml

    loaded = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    out = {}
    for name in ORIGINALS:
        about = loaded[name]
        out[name] = Original(about["title"], about["origin"], tuple(MappingLine(**row) for row in about["rows"]))
    return out


def page() -> str:
    """docs/migrate.md."""
    parts = [HEAD]
    for original in originals().values():
        parts.append(f"## {original.title}\n\n{original.origin}\n")
        rows = [f"| {line.kind} | `{line.theirs}` | {line.ours} | {line.note} |" for line in original.lines]
        parts.append("\n".join(["| | theirs | ours | |", "|---|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
