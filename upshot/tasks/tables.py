"""Tasks whose rows come from files or the Hub: where from, how they are split, how many are taken."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property

from upshot.config.bounds import Count, NonNegative, Whole
from upshot.core.conversation import Row
from upshot.core.errors import UserError
from upshot.tasks.base import Task
from upshot.tasks.datasets.files import Record, read_tables
from upshot.tasks.datasets.splits import split_in_three


class TableTask(Task):
    """Rows by split, made of the records of tables."""

    hub: str = ""
    """Hugging Face name, with @config where it has several; '' when the task has no set of its own."""
    other_hub: str = ""
    """Another dataset with the same rows, used if the first one cannot be loaded."""
    hub_splits: tuple[str, ...] = ()
    """Names of splits in that dataset, of which the first existing one is used; empty: all splits, by their names."""

    def __init__(
        self,
        file: str | None = None,
        train_file: str | None = None,
        validation_file: str | None = None,
        test_file: str | None = None,
        held_out: NonNegative = 0.1,
        limit: Count | None = None,
        split_seed: Whole = 0,
    ) -> None:
        """Make the task.

        file: a .jsonl, .parquet, .json or .csv file, a folder, or a Hub name with all splits. Default: the task's own
        Hub dataset. train_file, validation_file, test_file: one source per split instead.
        held_out: share of the goals (questions) for validation and for test, if the source has no splits.
        limit: maximum number of rows per split. split_seed: which goals are held out.
        """
        named = {"train": train_file, "validation": validation_file, "test": test_file}
        self._named = {split: source for split, source in named.items() if source}
        self._file = file or (None if self._named else self.hub)
        self.held_out, self.limit, self.split_seed = held_out, limit, split_seed

    def sources(self) -> list[str]:
        """The files, folders and Hub names that the rows are read from."""
        return [*([self._file] if self._file else []), *self._named.values()]

    @abstractmethod
    def parse_table(self, split: str, records: Sequence[Record]) -> list[Row]:
        """The rows that a split's records are."""

    def rows(self, split: str) -> Sequence[Row]:
        """The rows of a split; splits share no goal."""
        rows_of_split = self._splits.get(split, [])
        if not rows_of_split:
            sizes = ", ".join(f"{name} {len(rows)}" for name, rows in self._splits.items()) or "none"
            raise UserError(f"task '{self.name}' has no rows in split '{split}' (rows: {sizes})")
        return rows_of_split[: self.limit]

    def all_rows(self) -> Mapping[str, Sequence[Row]]:
        """The rows of every split that has any, however many there are."""
        return self._splits

    @cached_property
    def _splits(self) -> dict[str, list[Row]]:
        rows = {split: self.parse_table(split, records) for split, records in self._tables.items()}
        return split_in_three(rows, self.held_out, self.split_seed)

    @cached_property
    def _tables(self) -> dict[str, list[Record]]:
        """The raw records by split."""
        self.check_source()
        tables = self._read(self._file) if self._file else {}
        for split, source in self._named.items():
            tables[split] = [record for table in read_tables(source).values() for record in table]
        return tables

    def _read(self, source: str) -> dict[str, list[Record]]:
        """The records of a source; where the task's own Hub set cannot be had, those of its other one."""
        try:
            return read_tables(source, self.hub_splits)
        except UserError:
            if source == self.hub and self.other_hub:
                with suppress(UserError):
                    return read_tables(self.other_hub, self.hub_splits)
            raise

    def check_source(self) -> None:
        """Refuse a task that has nothing to read rows from."""
        if not self._file and not self._named:
            raise UserError(f"task '{self.name}' needs the option 'file' (.jsonl, .parquet, a folder or a Hub name)")
