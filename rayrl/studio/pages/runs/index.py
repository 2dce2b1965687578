"""An index of a run's episodes: where each record lies in ``traces.jsonl`` and what lists, filters and diagnosis need.

A SQLite file in the studio's own cache folder, never in the run. Invariants:

* reading goes on where it stopped; the batches are committed, so an index that was interrupted goes on too;
* an index belongs to one file: another inode, or a file that got shorter, begins it anew;
* an episode's result is its first complete record, else its newest one, as everywhere;
* labels may rest on the private goal, but nothing of a goal is stored.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from rayrl.errors import DataError
from rayrl.evaluation.diagnosis import label_record
from rayrl.evaluation.rows import KNOWN_SCHEMAS
from rayrl.evaluation.sources import Source, find_sources, load_goals, plan_chunks, read_lines
from rayrl.evaluation.view import view_of
from rayrl.export.filters import filter_values
from rayrl.schemas import JsonDict, sha256_hex
from rayrl.studio.pages.apart import apart
from rayrl.traces.store import TRACES

VERSION = "1"
BATCH = 256
LARGE = 8_000_000
"""Traces of fewer bytes are read while a page waits; so many are read in a process of their own, and no page waits."""
BRIEF_S = 0.1
"""How long a page waits for what needs the index of a large run; it asks again for the rest."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS attempts (
  position INTEGER PRIMARY KEY, length INTEGER NOT NULL, episode TEXT NOT NULL, attempt INTEGER NOT NULL,
  split TEXT NOT NULL, task INTEGER NOT NULL, sample INTEGER NOT NULL, complete INTEGER NOT NULL,
  success INTEGER, reward REAL, steps INTEGER, tokens INTEGER, duration REAL, ended TEXT, error TEXT,
  instruction TEXT, cause TEXT, labels BLOB, facts BLOB NOT NULL, result INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS by_episode ON attempts (episode, position);
CREATE INDEX IF NOT EXISTS by_result ON attempts (result, position);
CREATE INDEX IF NOT EXISTS by_outcome ON attempts (result, complete, cause);
CREATE INDEX IF NOT EXISTS by_task ON attempts (task);
CREATE TABLE IF NOT EXISTS found (label TEXT NOT NULL, position INTEGER NOT NULL, PRIMARY KEY (label, position))
  WITHOUT ROWID;
"""
_INSERT = (
    "INSERT OR REPLACE INTO attempts (position, length, episode, attempt, split, task, sample, complete, success,"
    " reward, steps, tokens, duration, ended, error, instruction, cause, labels, facts) VALUES ("
    + ",".join("?" * 19)
    + ")"
)
_MARK = """
UPDATE attempts SET result = (position = coalesce(
  (SELECT min(position) FROM attempts b WHERE b.episode = attempts.episode AND b.complete),
  (SELECT max(position) FROM attempts b WHERE b.episode = attempts.episode)))
WHERE episode IN (SELECT episode FROM attempts WHERE position >= ?)
"""


@dataclass
class RunIndex:
    """The index of one run; thread-safe. ``update`` is called by pages, the reading happens in a thread of its own."""

    run_dir: Path
    file: Path
    problem: str | None = None
    _thread: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def update(self, wait_s: float) -> bool:
        """Bring the index up to date within ``wait_s``; ``False`` while it is still being read.

        Nobody waits where very much is to be read.

        Raises:
            DataError: the traces cannot be read.
        """
        with self._lock:
            busy = self._thread is not None and self._thread.is_alive()
            if not busy and self._stale():
                self.problem = None
                self._thread = threading.Thread(target=self._work, name="run-index", daemon=True)
                self._thread.start()
                busy = True
            thread = self._thread
        if busy and thread is not None:
            thread.join(0.0 if self._apart() else wait_s)
        if self.problem:
            raise DataError(self.problem)
        return not (busy and thread is not None and thread.is_alive())

    def current(self) -> bool:
        """Whether all of the traces as they now lie there has been read."""
        return bool(self.meta()) and not self._stale()

    def share(self) -> float:
        """How much of the file has been read, 0 to 1."""
        stat = self._stat()
        size = stat.st_size if stat is not None else 0
        return min(1.0, int(self.meta().get("offset", 0)) / size) if size else 1.0

    def stamp(self) -> tuple[str, ...]:
        """Changes whenever the index does."""
        meta = self.meta()
        return (str(self.file), meta.get("offset", ""), meta.get("inode", ""), meta.get("built", ""))

    def meta(self) -> dict[str, str]:
        """Offset read so far, and counts of lines that are no record."""
        if not self.file.exists():
            return {}
        try:
            return dict(self.query("SELECT key, value FROM meta"))
        except sqlite3.Error:
            return {}

    def query(self, sql: str, arguments: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Rows of the index."""
        if not self.file.exists():
            return []
        with closing(self._connect()) as connection:
            return connection.execute(sql, arguments).fetchall()

    def record(self, position: int, length: int) -> JsonDict:
        """The record at a position of the file.

        Raises:
            DataError: there is none any more.
        """
        stat = (self.run_dir / TRACES).stat()
        return _records.get(self.run_dir / TRACES, position, length, stat.st_ino)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.file, timeout=20, isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        return connection

    def _apart(self) -> bool:
        """Whether so much is left to read that a process of its own does it."""
        meta, stat = self.meta(), self._stat()
        return stat is not None and stat.st_size - (int(meta["offset"]) if self._of(meta, stat) else 0) > LARGE

    def _stale(self) -> bool:
        meta, stat = self.meta(), self._stat()
        if stat is None:
            return False
        torn = int(meta.get("torn_size", -1))  # a torn tail is read again only when the file has grown
        return not self._of(meta, stat) or (int(meta["offset"]) != stat.st_size and torn != stat.st_size)

    def _of(self, meta: dict[str, str], stat: os.stat_result) -> bool:
        """Whether the index is of this very file."""
        return meta.get("version") == VERSION and meta.get("inode") == str(stat.st_ino) and "offset" in meta

    def _stat(self) -> os.stat_result | None:
        try:
            return (self.run_dir / TRACES).stat()
        except OSError:
            return None

    def _work(self) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if self._apart():
                apart(read_into, self.run_dir, self.file)
            else:
                self._read()
        except sqlite3.OperationalError as error:  # another studio at work on it, a full disk: the file is sound
            self.problem = f"the index of {self.run_dir.name} cannot be written ({error}); load the page again"
        except sqlite3.DatabaseError as error:
            self.file.unlink(missing_ok=True)  # a damaged cache is made anew by the next page
            self.problem = f"the index of {self.run_dir.name} was damaged ({error}); load the page again"
        except (OSError, DataError) as error:
            self.problem = f"{self.run_dir.name}: {error}"

    def _read(self) -> None:
        source = find_sources([str(self.run_dir)])[0]
        if source.kind != "jsonl":
            raise DataError(f"holds no {TRACES} (only a compacted file), so episodes cannot be shown one by one")
        stat = (self.run_dir / TRACES).stat()
        with closing(self._connect()) as connection:
            connection.executescript(_SCHEMA)
            meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
            start = int(meta.get("offset", 0))
            if meta.get("version") != VERSION or meta.get("inode") != str(stat.st_ino) or start > stat.st_size:
                connection.executescript("DELETE FROM attempts; DELETE FROM found; DELETE FROM meta;")
                meta, start = {"version": VERSION, "inode": str(stat.st_ino), "built": str(time.time())}, 0
            counts = {kind: int(meta.get(kind, 0)) for kind in ("malformed", "foreign")}
            for batch in _batches(source, start, stat.st_size, load_goals(source)):
                counts = {kind: counts[kind] + batch.counts[kind] for kind in counts}
                meta |= {k: str(v) for k, v in counts.items()}
                meta |= {"offset": str(batch.end), "torn_size": str(stat.st_size) if batch.torn else "-1"}
                connection.execute("BEGIN")
                connection.executemany(_INSERT, batch.rows)
                connection.executemany("INSERT OR IGNORE INTO found VALUES (?, ?)", batch.labels)
                if batch.rows:
                    connection.execute(_MARK, (batch.rows[0][0],))
                connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(meta.items()))
                connection.execute("COMMIT")


def read_into(run_dir: Path, file: Path) -> None:
    """Bring the index in ``file`` up to date; for a process of its own."""
    RunIndex(run_dir, file)._read()


@dataclass
class _Batch:
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    labels: list[tuple[str, int]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"malformed": 0, "foreign": 0})
    end: int = 0
    torn: bool = False


def _batches(source: Source, start: int, stop: int, goals: dict[int, JsonDict]) -> Iterator[_Batch]:
    """Rows for the bytes from ``start``; a torn last line is left for later. The last batch ends where reading did."""
    batch = _Batch(end=start)
    for chunk in plan_chunks([source]):
        if chunk.stop <= start or chunk.start >= stop:
            continue
        for offset, line, ended in read_lines(
            replace(chunk, start=max(chunk.start, start), stop=min(chunk.stop, stop))
        ):
            if not ended:
                batch.end, batch.torn = offset, True
                yield batch
                return
            row, kind = _row(line, offset, goals)
            if row is None:
                batch.counts[kind] += 1
            else:
                batch.rows.append(row[0])
                batch.labels += [(label, offset) for label in row[1]]
            batch.end = offset + len(line) + 1
            if len(batch.rows) >= BATCH:
                yield batch
                batch = _Batch(end=batch.end)
    batch.end = max(batch.end, stop)
    yield batch


def _row(line: bytes, offset: int, goals: dict[int, JsonDict]) -> tuple[tuple[tuple[Any, ...], list[str]] | None, str]:
    """The row of a line and its labels, or ``None`` and what the line is instead of a record."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None, "malformed"
    if not isinstance(record, dict) or record.get("schema", record.get("schema_version")) not in KNOWN_SCHEMAS:
        return None, "foreign"
    try:
        facts = filter_values(record)
    except (AttributeError, TypeError, ValueError, KeyError):
        return None, "malformed"
    if facts["episode_id"] is None or facts["task_id"] is None or facts["sample_id"] is None:
        return None, "malformed"
    labels, cause, success = b"[]", None, None
    names: list[str] = []
    if facts["complete"]:
        try:
            found = label_record(record, goals.get(facts["task_id"]))
            labels, cause, names = (
                orjson.dumps(found["labels"]),
                found["diagnosis"],
                [f["label"] for f in found["labels"]],
            )
            success = int(view_of(record).success)
        except (AttributeError, TypeError, ValueError, KeyError, IndexError, zlib.error):
            cause = None  # damaged beyond its row
    values = (
        offset,
        len(line),
        facts["episode_id"],
        facts["attempt"],
        facts["split"] or "",
        facts["task_id"],
        facts["sample_id"],
        int(facts["complete"]),
        success,
        facts["reward"],
        facts["steps"],
        facts["tokens"],
        facts["duration_s"],
        facts["termination_reason"],
        facts["error_class"],
        (facts["instruction"] or "")[:300],
        cause,
        labels,
        orjson.dumps({**facts, "instruction": (facts["instruction"] or "")[:2000]}, option=orjson.OPT_NON_STR_KEYS),
    )
    return (values, names), "ok"


class _Records:
    """The records read last, at most 256 MB of their text."""

    def __init__(self, most: int = 256 * 1024 * 1024) -> None:
        self._kept: OrderedDict[tuple[str, int, int], tuple[int, JsonDict]] = OrderedDict()
        self._most = most
        self._lock = threading.Lock()

    def get(self, path: Path, position: int, length: int, inode: int) -> JsonDict:
        key = (str(path), position, inode)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][1]
        with path.open("rb") as file:
            file.seek(position)
            data = file.read(length)
        try:
            record = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise DataError(f"{path.parent.name}: the record at byte {position} is gone; load the page again") from None
        with self._lock:
            self._kept[key] = (length, record)
            while sum(size for size, _ in self._kept.values()) > self._most and len(self._kept) > 1:
                self._kept.popitem(last=False)
        return record if isinstance(record, dict) else {}


_records = _Records()
_indices: dict[tuple[str, str], RunIndex] = {}
_guard = threading.Lock()


def index_of(cache: Path, run_dir: Path) -> RunIndex:
    """The index of a run; its file lies in ``cache``."""
    key = (str(cache), str(run_dir.resolve()))
    with _guard:
        if key not in _indices:
            _indices[key] = RunIndex(run_dir, cache / f"{sha256_hex(key[1])[:24]}.sqlite")
        return _indices[key]
