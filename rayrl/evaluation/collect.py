"""The reducing side of a pass over traces: keeps summary columns, sends wide rows and labels straight to disk."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rayrl.evaluation.known_calls import Call, CallCase
from rayrl.evaluation.label_rates import LabelTally
from rayrl.evaluation.pipeline import SUMMARY_COLUMNS
from rayrl.evaluation.rows import EPISODE_ARROW
from rayrl.evaluation.sources import split_unusable
from rayrl.evaluation.tool_calls import call_accuracy


class Collector:
    """Takes row tables in file order and keeps what summaries need; rows and labels go to ``out`` as they come.

    Use as a context manager; the files appear under their final names only when the pass went through.
    """

    def __init__(self, out: Path | None = None, *, labels: bool = False) -> None:
        self._out = out
        self._tables: list[pa.Table] = []
        self._tally = LabelTally() if labels else None
        self._calls: list[CallCase] = []
        self._unlabelled = 0
        self._labelled: set[tuple[str, str]] = set()
        self._rows: pq.ParquetWriter | None = None
        self._label_file: Any = None
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            self._rows = pq.ParquetWriter(out / ".episodes.parquet.tmp", EPISODE_ARROW, compression="zstd")
            if labels:
                self._label_file = (out / ".episode_labels.jsonl.tmp").open("wb")

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._out is None:
            return
        names = ["episodes.parquet"]
        if self._rows is not None:
            self._rows.close()
        if self._label_file is not None:
            self._label_file.close()
            names.append("episode_labels.jsonl")
        for name in names:
            temporary = self._out / f".{name}.tmp"
            if error is None:
                temporary.replace(self._out / name)
            else:
                temporary.unlink(missing_ok=True)

    def add(self, table: pa.Table) -> None:
        """One more table of rows, in file order."""
        if "labels_json" in table.schema.names:
            self._take_labels(table)
            table = table.select(EPISODE_ARROW.names)
        if self._rows is not None and table.num_rows:
            usable, _ = split_unusable(table)
            self._rows.write_table(usable)
        self._tables.append(table.select(SUMMARY_COLUMNS))

    def _take_labels(self, table: pa.Table) -> None:
        columns = ("run", "episode_id", "complete", "labels_json", "calls_json")
        for run, episode, complete, labels, calls in zip(*(table[c].to_pylist() for c in columns), strict=True):
            self._unlabelled += complete and labels is None
            if labels is None or (run, episode) in self._labelled:
                continue  # no result, or a duplicate of one
            self._labelled.add((run, episode))
            if self._tally is not None:
                self._tally.add(orjson.loads(labels))
            if self._label_file is not None:
                self._label_file.write(labels.encode() + b"\n")
            if calls:
                self._calls += [_case(item) for item in orjson.loads(calls)]

    def table(self) -> tuple[pa.Table, dict[str, int]]:
        """Summary columns of all records, and the number of unusable lines by kind."""
        joined = pa.concat_tables(self._tables) if self._tables else EPISODE_ARROW.empty_table().select(SUMMARY_COLUMNS)
        return split_unusable(joined)

    def diagnosis(self, *, level: float) -> dict[str, Any] | None:
        """Label rates and tool-call accuracy; ``None`` when no labels were asked for."""
        if self._tally is None:
            return None
        rates = self._tally.rates(level=level)
        return {
            **rates,
            "unlabelled": self._unlabelled,
            "tool_calls": call_accuracy(self._calls, level=level) if self._calls else None,
        }


def _case(item: list[Any]) -> CallCase:
    name, expected, arguments, actual = item
    return CallCase(name, Call(expected, arguments), Call(actual[0], actual[1]) if actual else None)
