"""One pass over traces: a byte range in, flat rows out. The same function runs in this process and in Ray Data tasks.

Invariants:

* the local engine and Ray Data call :func:`process_chunk` on ranges of the same sources; the reduction sorts rows
  canonically first, so both give identical numbers whatever the size of the ranges;
* nothing heavy is imported here (no statistics): every worker process imports this module.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa

from rayrl.evaluation.diagnosis import label_record
from rayrl.evaluation.fastjson import loads_for_row
from rayrl.evaluation.known_calls import Call, CallCase, expected_cases, known_calls
from rayrl.evaluation.rows import (
    EPISODE_ARROW,
    STEP_ARROW,
    STEP_FIELDS,
    episode_values,
    is_complete_row,
    step_rows,
    values_or_none,
    values_table,
)
from rayrl.evaluation.sources import (
    Chunk,
    Source,
    parquet_records,
    parquet_table,
    read_records,
    unusable_values,
)
from rayrl.evaluation.view import view_of
from rayrl.schemas import JsonDict

LABELLED_ARROW = EPISODE_ARROW.append(pa.field("labels_json", pa.string())).append(pa.field("calls_json", pa.string()))
BATCH = 512
_NOT_SUMMARISED = (
    *("seed", "prompt_sha256", "skill_ids", "category", "started_at", "done", "error_type", "cleanup_errors"),
    *("instruction", "purchase_json", "reward_detail_json"),
)
SUMMARY_COLUMNS = [name for name in EPISODE_ARROW.names if name not in _NOT_SUMMARISED]
"""What a summary reads; all that is kept of an episode in memory."""


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
    """Rows of a chunk: the summary columns, all of :data:`EPISODE_ARROW` for ``wide``, :data:`LABELLED_ARROW` for
    ``labels``."""
    run = chunk.source.run
    goals = options.goals.get(run, {})
    values: list[tuple[Any, ...]] = []
    extra: tuple[Any, ...] = (None, None) if options.labels else ()
    # labels look at everything; a row needs a small part of a record
    for offset, record, status in read_records(chunk, orjson.loads if options.labels else loads_for_row):
        row = values_or_none(record, run, offset, options.wide) if record is not None else None
        if record is None or row is None:
            values.append(unusable_values(run, offset, status if record is None else "malformed") + extra)
            continue
        values.append(row + (_labelled(record, run, goals, options) if options.labels else ()))
    if options.labels:
        return values_table(values, LABELLED_ARROW)
    return values_table(values, EPISODE_ARROW, None if options.wide else SUMMARY_COLUMNS)


def _labelled(record: JsonDict, run: str, goals: dict[int, JsonDict], options: PassOptions) -> tuple[Any, Any]:
    if not is_complete_row(record):
        return None, None
    task = (record.get("job") or {}).get("task_id")
    goal = goals.get(task) if isinstance(task, int) else None
    try:
        labels = orjson.dumps(label_record(record, goal, run=run)).decode()
        if goal is None and not options.expected:
            return labels, None
        view = view_of(record, goal)
        cases = expected_cases(view, task or 0, options.expected) if options.expected else known_calls(view)
        found = [_case_json(case) for case in cases]
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, zlib.error):
        return None, None  # damaged beyond its row; the collector counts it as unlabelled
    return labels, orjson.dumps(found).decode() if found else None


def _case_json(case: CallCase) -> list[Any]:
    actual = [case.actual.name, case.actual.arguments] if case.actual else None
    return [case.case_id, case.expected.name, case.expected.arguments, actual]


def step_table(chunk: Chunk) -> pa.Table:
    """Step rows of a chunk."""
    rows = [row for _, record, _ in read_records(chunk) if record for row in step_rows(record, run=chunk.source.run)]
    return values_table([tuple(row[name] for name in STEP_FIELDS) for row in rows], STEP_ARROW)


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
