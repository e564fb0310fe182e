"""docs/migrate.md, out of the table of `upshot recipe import`: python docs/draw_migrate.py > docs/migrate.md."""

from __future__ import annotations

from upshot.offline.migrate.recipe import read_table


def page() -> str:
    """The page: what the table says first, then a table for each of the originals."""
    parts = [read_table()["head"]]
    for original in read_table()["originals"].values():
        parts += [f"## {original['title']}\n\n{original['origin']}\n", "| | theirs | ours | |\n|---|---|---|---|"]
        for row in original["rows"]:
            ours = next((f"`{row[field]}`" for field in ("key", "command", "metric") if field in row), "")
            ours = ours or f"*no counterpart:* {row['reason']}"
            parts[-1] += f"\n| {row['kind']} | `{row['theirs']}` | {ours} | {row.get('note', '')} |"
        parts[-1] += "\n"
    return "\n".join([*parts, read_table()["foot"]])


if __name__ == "__main__":
    print(page(), end="")
