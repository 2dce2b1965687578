"""One pass over traces: a byte range in, flat rows out. The same function runs in this process and in Ray Data tasks.

Invariants:

* the local engine and Ray Data call :func:`process_chunk` on ranges of the same sources; the reduction sorts rows
  canonically first, so both give identical numbers whatever the size of the ranges;
* :class:`Collector` keeps summary columns only; wide rows and labels go straight to disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rayrl.evaluation.diagnosis import label_record
from rayrl.evaluation.fastjson import loads_for_row
from rayrl.evaluation.label_rates import LabelTally
from rayrl.evaluation.rows import (
    EPISODE_ARROW,
    STEP_ARROW,
    STEP_FIELDS,
    episode_values,
    is_complete_row,
    step_rows,
    values_table,
)
from rayrl.evaluation.sources import (
    Chunk,
    Source,
    parquet_records,
    parquet_table,
    read_records,
    split_unusable,
    unusable_values,
)
from rayrl.evaluation.tool_calls import Call, CallCase, call_accuracy, expected_cases, known_calls
from rayrl.evaluation.view import view_of
from rayrl.schemas import JsonDict

LABELLED_ARROW = EPISODE_ARROW.append(pa.field("labels_json", pa.string())).append(pa.field("calls_json", pa.string()))
BATCH = 512
WIDE_COLUMNS = frozenset({"instruction", "purchase_json", "reward_detail_json"})
SUMMARY_COLUMNS = [name for name in EPISODE_ARROW.names if name not in WIDE_COLUMNS]


@dataclass(frozen=True)
class PassOptions:
    """What one pass should produce beside the summary columns."""

    wide: bool = False
    """Instruction, purchase and reward detail too (for files of rows)."""
    labels: bool = False
    """Diagnosis labels and known tool calls of complete records."""
    goals: dict[str, dict[int, JsonDict]] = field(default_factory=dict)
    """Private goals by run and task id; only labels look at them."""
    expected: dict[tuple[int, int], Call] = field(default_factory=dict)
    """Known right calls by (task id, step)."""


def process_chunk(chunk: Chunk, options: PassOptions) -> pa.Table:
    """Rows of a chunk: :data:`EPISODE_ARROW`, or :data:`LABELLED_ARROW` when labels are asked for."""
    run = chunk.source.run
    goals = options.goals.get(run, {})
    values: list[tuple[Any, ...]] = []
    extra: tuple[Any, ...] = (None, None) if options.labels else ()
    # labels look at everything; a row needs a small part of a record
    for offset, record, status in read_records(chunk, orjson.loads if options.labels else loads_for_row):
        if record is None:
            values.append(unusable_values(run, offset, status) + extra)
            continue
        row = episode_values(record, run, offset, options.wide)
        values.append(row + (_labelled(record, run, goals, options) if options.labels else ()))
    return values_table(values, LABELLED_ARROW if options.labels else EPISODE_ARROW)


def _labelled(record: JsonDict, run: str, goals: dict[int, JsonDict], options: PassOptions) -> tuple[Any, Any]:
    if not is_complete_row(record):
        return None, None
    task = (record.get("job") or {}).get("task_id")
    goal = goals.get(task) if isinstance(task, int) else None
    labels = orjson.dumps(label_record(record, goal, run=run)).decode()
    if goal is None and not options.expected:
        return labels, None
    view = view_of(record, goal)
    cases = list(expected_cases(view, task or 0, options.expected)) if options.expected else list(known_calls(view))
    return labels, orjson.dumps([_case_json(case) for case in cases]).decode() if cases else None


def _case_json(case: CallCase) -> list[Any]:
    actual = [case.actual.name, case.actual.arguments] if case.actual else None
    return [case.case_id, case.expected.name, case.expected.arguments, actual]


def _case(item: list[Any]) -> CallCase:
    name, expected, arguments, actual = item
    return CallCase(name, Call(expected, arguments), Call(actual[0], actual[1]) if actual else None)


def step_table(chunk: Chunk) -> pa.Table:
    """Step rows of a chunk."""
    rows = [row for _, record, _ in read_records(chunk) if record for row in step_rows(record, run=chunk.source.run)]
    return values_table([tuple(row[name] for name in STEP_FIELDS) for row in rows], STEP_ARROW)


class Collector:
    """Takes row tables in file order and keeps what summaries need; rows and labels go to ``out`` as they come.

    Use as a context manager; the files appear under their final names only when the pass went through.
    """

    def __init__(self, out: Path | None = None, *, labels: bool = False) -> None:
        self._out = out
        self._tables: list[pa.Table] = []
        self._tally = LabelTally() if labels else None
        self._calls: list[CallCase] = []
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
        columns = ("run", "episode_id", "labels_json", "calls_json")
        for run, episode, labels, calls in zip(*(table[c].to_pylist() for c in columns), strict=True):
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
        return {**rates, "tool_calls": call_accuracy(self._calls, level=level) if self._calls else None}


def _labelled_parquet(source: Source, options: PassOptions) -> Iterator[pa.Table]:
    goals = options.goals.get(source.run, {})
    values: list[tuple[Any, ...]] = []
    for position, record in parquet_records(source):
        row = episode_values(record, source.run, position, options.wide)
        values.append(row + _labelled(record, source.run, goals, options))
        if len(values) >= BATCH:
            yield values_table(values, LABELLED_ARROW)
            values = []
    yield values_table(values, LABELLED_ARROW)


def local_tables(sources: list[Source], chunks: list[Chunk], options: PassOptions) -> Iterator[pa.Table]:
    """Row tables of all sources, one after the other, in this process."""
    for source in sources:
        if source.kind == "parquet" and options.labels:
            yield from _labelled_parquet(source, options)
        elif source.kind == "parquet":
            yield parquet_table(source, None if options.wide else SUMMARY_COLUMNS)
    for chunk in chunks:
        yield process_chunk(chunk, options)
