"""Where traces lie and how they are read: local paths, globs and object stores, in byte ranges or as Parquet.

Invariants:

* a line belongs to the byte range in which it begins, so ranges of any size yield every line exactly once;
* a line that cannot be used becomes a row that says so (``status`` malformed, torn or foreign), never an exception and
  never silence: readers count them;
* memory is bounded by the size of a range, not of a file.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from rayrl.errors import DataError
from rayrl.evaluation.fastjson import loads_for_row
from rayrl.evaluation.rows import EPISODE_ARROW, KNOWN_SCHEMAS, values_or_none, values_table
from rayrl.schemas import JsonDict
from rayrl.traces.store import PRIVATE, TRACES

CHUNK_BYTES = 8 * 1024 * 1024
PARQUET = "traces.parquet"
UNUSABLE = ("malformed", "torn", "foreign")
"""``status`` of rows that stand for lines that are no episode record."""

_BUFFER_BYTES = 1024 * 1024
_URL = re.compile(r"^[a-z][a-z0-9+.-]*://")
_BLANK = len(EPISODE_ARROW)


@dataclass(frozen=True)
class Source:
    """One trace file of one run."""

    run: str
    """How the run is called: the name of its directory."""
    url: str
    """Path of the file within its filesystem."""
    base: str
    """What was asked for: tells local paths from object stores (and carries their endpoint options)."""
    size: int
    kind: str
    """``jsonl`` or ``parquet``."""

    @property
    def directory(self) -> str:
        """Directory of the file within its filesystem."""
        return str(PurePosixPath(self.url).parent)

    def filesystem(self) -> pafs.FileSystem:
        """The filesystem the file lies in."""
        return filesystem_of(self.base)[0]


@dataclass(frozen=True)
class Chunk:
    """The lines of a source that begin in ``[start, stop)``."""

    source: Source
    start: int
    stop: int


def filesystem_of(location: str) -> tuple[pafs.FileSystem, str]:
    """Filesystem and path of a local path or a ``scheme://`` URL (``s3://bucket/key?endpoint_override=...``).

    Raises:
        DataError: unknown scheme or malformed URL.
    """
    if not _URL.match(location):
        return pafs.LocalFileSystem(), str(Path(location).expanduser().resolve())
    try:
        filesystem, path = pafs.FileSystem.from_uri(location)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise DataError(f"{location}: cannot be opened: {' '.join(str(error).split())[:200]}") from None
    return filesystem, path


def find_sources(locations: list[str]) -> list[Source]:
    """The trace files of run directories, files and globs, in the order given.

    A directory stands for its ``traces.jsonl``, else its ``traces.parquet``. Runs whose directories share a name are
    told apart by their paths.

    Raises:
        DataError: nothing is there, or a directory holds no traces; the message says what was looked for.
    """
    found: list[Source] = []
    for location in locations:
        filesystem, path = filesystem_of(location)
        matches = _expand(filesystem, path, remote=bool(_URL.match(location)))
        if not matches:
            raise DataError(f"{location}: nothing there (a run directory, a traces file or a glob is wanted)")
        for match in matches:
            found.append(_source(filesystem, match, location))
    unique = list({source.url: source for source in found}.values())
    names = [source.run for source in unique]
    return [s if names.count(s.run) == 1 else Source(s.directory, s.url, s.base, s.size, s.kind) for s in unique]


def _expand(filesystem: pafs.FileSystem, path: str, *, remote: bool) -> list[str]:
    if not any(mark in path for mark in "*?["):
        info = filesystem.get_file_info(path)
        return [] if info.type == pafs.FileType.NotFound else [path]
    if not remote:
        root = Path(path).anchor
        return sorted(str(match) for match in Path(root).glob(path[len(root) :]))
    fixed = re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition("/")[0]
    selector = pafs.FileSelector(fixed, recursive=True, allow_not_found=True)
    return sorted(i.path for i in filesystem.get_file_info(selector) if PurePosixPath(i.path).match(path))


def _source(filesystem: pafs.FileSystem, path: str, location: str) -> Source:
    info = filesystem.get_file_info(path)
    if info.type == pafs.FileType.Directory:
        inside = filesystem.get_file_info([f"{path.rstrip('/')}/{name}" for name in (TRACES, PARQUET)])
        present = [item for item in inside if item.type == pafs.FileType.File]
        if not present:
            raise DataError(f"{location}: the directory {path} holds neither {TRACES} nor {PARQUET}")
        info = present[0]
    kind = "parquet" if info.path.endswith(".parquet") else "jsonl"
    parent, stem = PurePosixPath(info.path).parent.name, PurePosixPath(info.path).stem
    run = parent if PurePosixPath(info.path).name in (TRACES, PARQUET) else stem
    return Source(run=run, url=info.path, base=location, size=info.size, kind=kind)


def plan_chunks(sources: list[Source], chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Byte ranges that cover the JSONL sources, in order."""
    return [
        Chunk(source, start, min(start + chunk_bytes, source.size))
        for source in sources
        if source.kind == "jsonl"
        for start in range(0, source.size, chunk_bytes)
    ]


def read_lines(chunk: Chunk) -> Iterator[tuple[int, bytes, bool]]:
    """``(offset, line, ended)`` of every non-empty line that begins in the chunk, without its newline.

    ``ended`` is false for a last line without newline. Lines longer than a range are read to their end.
    """
    filesystem = chunk.source.filesystem()
    if isinstance(filesystem, pafs.LocalFileSystem):
        # Python's own buffered reader splits lines with one copy
        with Path(chunk.source.url).open("rb", buffering=_BUFFER_BYTES) as local:
            yield from _lines(local, chunk)
    else:
        with filesystem.open_input_file(chunk.source.url) as remote:
            yield from _lines(io.BufferedReader(remote, _BUFFER_BYTES), chunk)


def _lines(file: IO[bytes], chunk: Chunk) -> Iterator[tuple[int, bytes, bool]]:
    position = chunk.start
    if chunk.start:
        # a line beginning exactly at start belongs here: then the byte before it is a newline
        file.seek(chunk.start - 1)
        head = file.readline(chunk.stop - chunk.start + 1)
        if not head.endswith(b"\n"):
            return  # no line begins here
        position += len(head) - 1
    while position < chunk.stop:
        line = file.readline()
        if not line:
            return
        ended = line.endswith(b"\n")
        if len(line) > ended:
            yield position, line[:-1] if ended else line, ended
        position += len(line)


def read_records(
    chunk: Chunk, loads: Callable[[bytes], Any] = orjson.loads
) -> Iterator[tuple[int, JsonDict | None, str]]:
    """``(offset, record, status)`` per line; the record is ``None`` and the status says why when it is unusable.

    ``loads`` may leave out parts of a record that the caller does not look at.
    """
    for offset, line, ended in read_lines(chunk):
        try:
            record = loads(line)
        except orjson.JSONDecodeError:
            yield offset, None, "malformed" if ended else "torn"
            continue
        known = isinstance(record, dict) and record.get("schema", record.get("schema_version")) in KNOWN_SCHEMAS
        yield (offset, record, "ok") if known else (offset, None, "foreign")


def unusable_values(run: str, offset: int, status: str) -> tuple[Any, ...]:
    """A row that stands for a line that is no episode record."""
    values: list[Any] = [None] * _BLANK
    values[0], values[1], values[9], values[10] = run, offset, status, False
    return tuple(values)


def chunk_table(chunk: Chunk, *, wide: bool = False) -> pa.Table:
    """Episode rows of a chunk, unusable lines included (see :data:`UNUSABLE`)."""
    run = chunk.source.run
    values = []
    for offset, record, status in read_records(chunk, loads_for_row):
        row = values_or_none(record, run, offset, wide) if record is not None else None
        values.append(row or unusable_values(run, offset, status if record is None else "malformed"))
    return values_table(values)


def parquet_table(source: Source, columns: list[str] | None = None) -> pa.Table:
    """Episode rows of a compacted file, under the name of this source's run."""
    import pyarrow.parquet as pq

    with source.filesystem().open_input_file(source.url) as file:
        parquet = pq.ParquetFile(file)
        wanted = columns if columns is not None else EPISODE_ARROW.names
        missing = set(wanted) - set(parquet.schema_arrow.names)
        if missing:
            raise DataError(f"{source.url}: not a compacted trace file (column {sorted(missing)[0]} is missing)")
        table = parquet.read(columns=wanted)
    index = table.schema.get_field_index("run")
    if index >= 0:
        table = table.set_column(index, "run", pa.repeat(pa.scalar(source.run), table.num_rows))
    return table


def parquet_records(source: Source) -> Iterator[tuple[int, JsonDict]]:
    """``(position, record)`` of every record of a compacted file, one row group at a time."""
    import pyarrow.parquet as pq

    with source.filesystem().open_input_file(source.url) as file:
        parquet = pq.ParquetFile(file)
        if "record" not in parquet.schema_arrow.names:
            raise DataError(f"{source.url}: holds rows but no records; compact the traces again")
        for batch in parquet.iter_batches(batch_size=256, columns=["position", "record"]):
            positions, records = batch.column(0).to_pylist(), batch.column(1)
            for position, record in zip(positions, records, strict=True):
                yield position, orjson.loads(memoryview(record.as_buffer()))


def iter_records(source: Source) -> Iterator[JsonDict]:
    """Every usable record of a source in file order, whatever its format; streams."""
    if source.kind == "parquet":
        yield from (record for _, record in parquet_records(source))
        return
    for chunk in plan_chunks([source]):
        yield from (record for _, record, _ in read_records(chunk) if record is not None)


def read_rows(sources: list[Source], *, wide: bool = False, chunk_bytes: int = CHUNK_BYTES) -> pa.Table:
    """All episode rows of the sources, unusable lines included; streams, keeps only the rows."""
    tables = [parquet_table(source) for source in sources if source.kind == "parquet"]
    tables += [chunk_table(chunk, wide=wide) for chunk in plan_chunks(sources, chunk_bytes)]
    return pa.concat_tables(tables) if tables else EPISODE_ARROW.empty_table()


def split_unusable(table: pa.Table) -> tuple[pa.Table, dict[str, int]]:
    """The rows of real records, and the number of unusable lines by kind."""
    mask = pc.is_in(table["status"], value_set=pa.array(UNUSABLE))
    bad = table.filter(mask)
    counts = dict.fromkeys(UNUSABLE, 0)
    for status in bad["status"].to_pylist():
        counts[status] += 1
    return (table.filter(pc.invert(mask)) if bad.num_rows else table), counts


def read_beside(source: Source, name: str) -> bytes | None:
    """A small file beside the traces (``manifest.json``), or ``None``."""
    filesystem, path = source.filesystem(), f"{source.directory}/{name}"
    if filesystem.get_file_info(path).type != pafs.FileType.File:
        return None
    with filesystem.open_input_stream(path) as file:
        data: bytes = file.read()
    return data


def manifest_of(source: Source) -> JsonDict | None:
    """The run's manifest, or ``None`` where there is none.

    Raises:
        DataError: it is not a JSON object.
    """
    data = read_beside(source, "manifest.json")
    if data is None:
        return None
    try:
        manifest = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{source.directory}/manifest.json: not JSON: {error}") from None
    if not isinstance(manifest, dict):
        raise DataError(f"{source.directory}/manifest.json: not a JSON object")
    return manifest


def expected_jobs(manifest: JsonDict | None) -> int | None:
    """How many episodes the manifest froze; ``None`` when it does not say."""
    jobs = ((manifest or {}).get("semantic") or {}).get("jobs")
    return len(jobs) if isinstance(jobs, list) else None


def load_goals(source: Source) -> dict[int, JsonDict]:
    """Private goal by task id from ``private.jsonl`` beside the traces; for diagnosis only. Empty where there is none.

    A goal belongs to the task, so memory grows with tasks, not with episodes.
    """
    filesystem, path = source.filesystem(), f"{source.directory}/{PRIVATE}"
    info = filesystem.get_file_info(path)
    if info.type != pafs.FileType.File:
        return {}
    goals: dict[int, JsonDict] = {}
    private = Source(source.run, path, source.base, info.size, "jsonl")
    for chunk in plan_chunks([private]):
        for _, line, _ in read_lines(chunk):
            try:
                item = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            found = re.match(r"task-(\d+)__", str(item.get("episode_id"))) if isinstance(item, dict) else None
            if found and isinstance(item.get("goal"), dict):
                goals.setdefault(int(found[1]), item["goal"])
    return goals
