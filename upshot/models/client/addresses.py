"""The addresses of a model's replicas: as a recipe lists them, or in a file that may change while a run goes on."""

from __future__ import annotations

from pathlib import Path

from upshot.core.errors import UserError


def read_addresses(url: str | tuple[str, ...]) -> tuple[str, ...]:
    """The URLs, each once. A file holds one a line; empty lines and those that begin with '#' are skipped."""
    if not isinstance(url, str):
        return url
    try:
        lines = Path(url).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read '{url}' ({error}); 'url' is an address that begins with http:// or https://, a list of "
            "such, or a file with one a line"
        ) from error
    named = [line.strip().rstrip("/") for line in lines]
    found = tuple(dict.fromkeys(line for line in named if line and not line.startswith("#")))
    for line in found:
        if not line.startswith(("http://", "https://")):
            raise UserError(f"'{url}' names the replica '{line}', which is no URL: 'http://host:8000/v1'")
    if not found:
        raise UserError(f"'{url}' lists no replica; write one address a line: 'http://host:8000/v1'")
    return found
