"""JSON lines to Parquet (zstd) and back: flat columns for fast summaries, the record's bytes beside them.

The file is lossless for records: column ``record`` holds each one (its interned part unpacked, because columns
compress far better than packed parts do), ``position`` where it stood. Lines that are no record (torn, malformed,
foreign) are left out and counted. A compacted file appears whole or not at all.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rayrl.errors import DataError
from rayrl.evaluation.rows import EPISODE_ARROW, KNOWN_SCHEMAS, episode_values, values_table
from rayrl.evaluation.sources import UNUSABLE, Source, plan_chunks, read_lines
from rayrl.schemas import JsonDict
from rayrl.traces.schema import interned

COMPACT_ARROW = EPISODE_ARROW.append(pa.field("record", pa.large_binary()))
ZSTD_LEVEL = 3
GROUP_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class CompactReport:
    """What was written, or compared."""

    records: int
    json_bytes: int
    parquet_bytes: int
    unusable: dict[str, int]
    mismatches: list[str]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def _parse(line: bytes, ended: bool) -> tuple[JsonDict | None, str]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None, "malformed" if ended else "torn"
    if not isinstance(record, dict) or record.get("schema", record.get("schema_version")) not in KNOWN_SCHEMAS:
        return None, "foreign"
    return record, "ok"


def _stored(record: JsonDict, line: bytes) -> bytes:
    """The bytes kept of a record: the line itself, or with its interned part unpacked."""
    if not isinstance(record.get("interned"), str):
        return line
    return orjson.dumps({**record, "interned": interned(record)})


def compact(source: Source, target: Path, *, zstd_level: int = ZSTD_LEVEL) -> CompactReport:
    """Write ``target`` from a JSONL source, streaming.

    Raises:
        DataError: the source is not JSON lines.
    """
    if source.kind != "jsonl":
        raise DataError(f"{source.url}: only JSON lines can be compacted")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    unusable = dict.fromkeys(UNUSABLE, 0)
    records = 0
    try:
        with pq.ParquetWriter(temporary, COMPACT_ARROW, compression="zstd", compression_level=zstd_level) as writer:
            for chunk in plan_chunks([source], GROUP_BYTES):
                values = []
                for offset, line, ended in read_lines(chunk):
                    record, status = _parse(line, ended)
                    if record is None:
                        unusable[status] += 1
                    else:
                        values.append((*episode_values(record, source.run, offset), _stored(record, line)))
                if values:
                    writer.write_table(values_table(values, COMPACT_ARROW))
                    records += len(values)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return CompactReport(records, source.size, target.stat().st_size, unusable, [])


def verify(source: Source, target: Path, *, limit: int = 10) -> CompactReport:
    """Compare a compacted file with its JSON lines: every record's bytes and every flat column, in order.

    ``mismatches`` names the first ``limit`` differences by byte offset; empty means the file holds the same.
    """
    file = pq.ParquetFile(target)
    if file.schema_arrow.names != COMPACT_ARROW.names:
        raise DataError(f"{target}: not a compacted trace file of this version")
    stored = ((row.to_pylist(), row) for row in file.iter_batches(batch_size=256))
    flat = (item for rows, _ in stored for item in rows)
    unusable = dict.fromkeys(UNUSABLE, 0)
    problems: list[str] = []
    records = 0
    for chunk in plan_chunks([source], GROUP_BYTES):
        for offset, line, ended in read_lines(chunk):
            record, status = _parse(line, ended)
            if record is None:
                unusable[status] += 1
                continue
            records += 1
            row = next(flat, None)
            if row is None:
                problems.append(f"byte {offset}: missing in the compacted file")
            elif row["position"] != offset or row["record"] != _stored(record, line):
                problems.append(f"byte {offset}: the record differs (stored position {row['position']})")
            else:
                expected = dict(zip(EPISODE_ARROW.names, episode_values(record, row["run"], offset), strict=True))
                wrong = [name for name, value in expected.items() if row[name] != value]
                problems += [f"byte {offset}: column {name} differs" for name in wrong]
            if len(problems) >= limit:
                return CompactReport(records, source.size, target.stat().st_size, unusable, problems[:limit])
    problems += [f"position {row['position']}: not in the JSON lines" for row in flat][: limit - len(problems)]
    return CompactReport(records, source.size, target.stat().st_size, unusable, problems)
