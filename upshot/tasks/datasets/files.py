"""Tables from anywhere: a .jsonl, .json, .parquet, .csv or .arrow file, a folder of them, or a Hugging Face name.

A folder may be one that `datasets` wrote with save_to_disk. A Hub name is `owner/name`, or `owner/name@config` where
the dataset has several.

This file only reads: the result is plain dictionaries by split, and `records.py` knows what their columns mean. Only
CollabLLM's nested conversations are split here, because one of them is many records. `datasets` is imported only for a
Hugging Face name; without a network, that is one clear error.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError, import_optional
from upshot.core.files import expand_home, read_text, read_user_jsonl

Record = dict[str, Any]
"""One row of a file, column by column."""

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "validation"),
    "test": "test",
}
"""Words in a file name (or names of the Hub's splits) and the split that they mean."""

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")


def read_tables(
    source: str, hub_splits: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> dict[str, list[Record]]:
    """The records of a source by split; everything is 'train' if the source names no split.

    `hub_splits` picks splits of a Hub dataset by their own names (they then count as 'train'). The columns `without`
    are not read from parquet and the Hub, where they can be most of the bytes.
    """
    return {split: unnest(records) for split, records in _tables(source, hub_splits, without).items()}


def _tables(source: str, hub_splits: tuple[str, ...], without: tuple[str, ...]) -> dict[str, list[Record]]:
    path = Path(expand_home(source))
    if path.is_dir():
        return _folder(path, without)
    if path.is_file():
        return {split_of(path.name): read_table(path, without)}
    if path.suffix in READERS:
        if command := how_to_prepare(source):
            raise UserError(f"no file '{source}'; {command}")
        raise UserError(f"no file '{source}'; give a .jsonl, .json, .parquet or .csv file, a folder, or a Hub name")
    if HUB_NAME.fullmatch(source):
        return _hub(source, hub_splits, without)
    raise UserError(f"'{source}' is neither a file, a folder nor a Hugging Face name (owner/name or owner/name@config)")


def how_to_prepare(file: str) -> str:
    """The command that makes a file of `upshot data prepare`, for an error message; '' for any other file."""
    match = re.fullmatch(r"(sft|rl|dpo|user)_(train|validation)\.parquet", Path(file).name)
    if match is None:
        return ""
    return (
        f"make it with `upshot data prepare --dataset SOURCE --for {match[1]} --out {Path(file).parent}` (the "
        "first lines of the recipe, or of the one that it extends, name the SOURCE)"
    )


def read_table(path: Path, without: tuple[str, ...] = ()) -> list[Record]:
    """The records of one file, whatever its format."""
    if path.is_file() and not path.stat().st_size:
        raise UserError(f"'{path}' is empty: it has no rows")
    if path.suffix == ".parquet":
        return list(_parquet(path, without))
    reader = READERS.get(path.suffix)
    if reader is None:
        raise UserError(f"cannot read '{path}': its ending is not one of {', '.join(READERS)}")
    return list(reader(path))


def split_of(file_name: str) -> str:
    """The split that a file name means: 'rl_validation.parquet' → 'validation'; 'train' if it names none."""
    words = re.split(r"[^a-z]+", file_name.lower())
    return next((SPLITS[word] for word in reversed(words) if word in SPLITS), "train")


def _folder(folder: Path, without: tuple[str, ...]) -> dict[str, list[Record]]:
    files = sorted(p for p in folder.rglob("*") if p.suffix in READERS and p.is_file() and p.name[0] not in "._")
    if any(file.suffix == ".arrow" for file in files):  # save_to_disk, whose .json files describe the data
        files = [file for file in files if file.suffix == ".arrow"]
    if not files:
        raise UserError(f"folder '{folder}' has no file ending in {', '.join(READERS)}")
    tables: dict[str, list[Record]] = {}
    for file in files:
        name = file.parent.name if file.suffix == ".arrow" and file.parent != folder else file.name
        tables.setdefault(split_of(name), []).extend(read_table(file, without))
    return tables


def _arrow(path: Path) -> Iterator[Record]:
    """The records of a stream of batches, as `datasets` writes it."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as batches:
            for batch in batches:
                yield from batch.to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} is not readable as arrow: {error}") from error


def _jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        yield from read_user_jsonl(file, str(path))


def _json(path: Path) -> Iterator[Record]:
    """A list of objects, bare or under 'data' (the layout of the CoQA family)."""
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error} (one object a line? name it .jsonl)") from error
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} must contain a list of objects, or an object with such a list under 'data'")
    yield from rows


def _parquet(path: Path, without: tuple[str, ...] = ()) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        table = file.read([name for name in file.schema_arrow.names if name not in without])
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} is not readable as parquet: {error}") from error
    for batch in table.to_batches(max_chunksize=1000):
        yield from batch.to_pylist()


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # a cell may hold a whole article
    for number, row in enumerate(csv.DictReader(io.StringIO(read_text(path), newline="")), 1):
        if None in row:
            raise UserError(f"'{path}', row {number} has more cells than the header; put cells with commas in quotes")
        yield row


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
    ".arrow": _arrow,
}


def _hub(name: str, hub_splits: tuple[str, ...], without: tuple[str, ...]) -> dict[str, list[Record]]:
    hub = import_optional("datasets", f"'{name}' is a Hugging Face name: pip install -e '.[hub]', or give a file")
    try:
        loaded = hub.load_dataset(*name.split("@"))
    except (OSError, ValueError, RuntimeError) as error:  # not found, offline, gated: the user can fix all of these
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"cannot load '{name}' from Hugging Face: {first_line}; without a network, download it elsewhere and give "
            f"the .jsonl or .parquet file, or the folder"
        ) from error
    loaded = {s: rows.remove_columns([c for c in without if c in rows.column_names]) for s, rows in loaded.items()}
    if hub_splits:
        present = [split for split in hub_splits if split in loaded]
        if not present:
            raise UserError(f"'{name}' has no split {' or '.join(hub_splits)}; it has {', '.join(loaded)}")
        return {"train": [dict(row) for row in loaded[present[0]]]}
    tables: dict[str, list[Record]] = {}
    for split, rows in loaded.items():
        tables.setdefault(split_of(split), []).extend(dict(row) for row in rows)
    return tables


def unnest(records: Sequence[Record]) -> list[Record]:
    """The records; those of CollabLLM's `*_multiturn.json` (turns of responses) as one record per response."""
    return [flat for number, record in enumerate(records) for flat in _responses(record, number)]


def _responses(record: Record, number: int) -> Iterator[Record]:
    turns = record.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and "responses" in turn for turn in turns):
        yield record
        return
    # A conversation without a number is numbered by its position in the file.
    shared = {"conv_id": number, **{key: value for key, value in record.items() if key != "turns"}}
    for turn in turns:
        prompt = turn.get("prompt") or []
        for response in turn["responses"]:
            yield {**shared, "prompt": prompt, "turn_id": len(prompt), **response}
