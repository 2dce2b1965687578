"""Which records of a run are exported, and reaching them without holding the run in memory.

One pass over flat rows finds the result of every episode (its first complete record, else the newest failed one); the
records themselves are then read where they stand. So an export never counts a duplicate, and memory is that of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow.parquet as pq

from rayrl.errors import DataError
from rayrl.evaluation.sources import Source, read_rows, split_unusable
from rayrl.evaluation.summary import as_table, results
from rayrl.schemas import JsonDict


@dataclass(frozen=True)
class Place:
    """Where the result of an episode stands."""

    source: Source
    position: int
    split: str
    task_id: int
    sample_id: int
    complete: bool


def find_results(source: Source) -> tuple[list[Place], dict[str, int]]:
    """The places of all results of a run in (split, task, sample) order, and what was met on the way."""
    table, unusable = split_unusable(read_rows([source]))
    rows, _, counts = results(as_table(table))
    columns = ("position", "split", "task_id", "sample_id", "complete")
    places = [
        Place(source, position, split or "", task, sample, complete)
        for position, split, task, sample, complete in zip(*(rows[c].to_pylist() for c in columns), strict=True)
    ]
    return places, {**counts, **unusable}


class RecordReader:
    """Reads single records of a source by position (JSONL offset, or the position stored in a compacted file)."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._file: Any = source.filesystem().open_input_file(source.url)
        self._parquet: pq.ParquetFile | None = None
        self._groups: dict[int, tuple[int, int]] = {}
        self._cached: tuple[int, list[bytes]] = (-1, [])
        if source.kind == "parquet":
            self._parquet = pq.ParquetFile(self._file)
            for number in range(self._parquet.num_row_groups):
                positions = self._parquet.read_row_group(number, columns=["position"]).column(0).to_pylist()
                self._groups |= {position: (number, index) for index, position in enumerate(positions)}

    def read(self, position: int) -> JsonDict:
        """The record at ``position``.

        Raises:
            DataError: there is none (the file changed meanwhile).
        """
        try:
            record = orjson.loads(self._line(position))
        except (orjson.JSONDecodeError, KeyError) as error:
            raise DataError(f"{self._source.url}: no record at {position}: {error}") from None
        if not isinstance(record, dict):
            raise DataError(f"{self._source.url}: no record at {position}")
        return record

    def _line(self, position: int) -> bytes:
        if self._parquet is not None:
            number, index = self._groups[position]
            if self._cached[0] != number:
                column = self._parquet.read_row_group(number, columns=["record"]).column(0)
                self._cached = (number, column.to_pylist())
            return self._cached[1][index]
        self._file.seek(position)
        data = b""
        while not data.endswith(b"\n"):
            more: bytes = self._file.read(256 * 1024)
            if not more:
                break
            end = more.find(b"\n")
            data += more if end < 0 else more[: end + 1]
        return data

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def read_places(places: list[Place]) -> Iterator[JsonDict]:
    """The records at ``places``, in that order."""
    readers: dict[str, RecordReader] = {}
    try:
        for place in places:
            reader = readers.get(place.source.url)
            if reader is None:
                reader = readers[place.source.url] = RecordReader(place.source)
            yield reader.read(place.position)
    finally:
        for reader in readers.values():
            reader.close()
