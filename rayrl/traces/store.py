"""The append-only trace store of one run directory.

``traces.jsonl`` one record per attempt; ``private.jsonl`` (mode 0600) the private goals, joined by episode id and
attempt; ``training.jsonl`` token ids and log-probs, a namespace of their own. Invariants:

* one writer per run, held by a file lock; a second process is refused;
* append, flush, fsync with group commit: everything queued while the disk works goes out in the next commit; private
  and training lines are durable before the trace line that they belong to;
* a torn tail is not a record and never hides one: the writer ends it with a newline, readers skip and count it;
* an episode's result is its first complete record, else its newest failed one; later complete duplicates are counted,
  never used;
* reading streams: memory does not grow with the file (it grows with the number of episodes only where an index of ids
  is asked for).
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock, Timeout

from rayrl.errors import ConfigError, DataError, RunConflictError
from rayrl.schemas import EPISODE_SCHEMA, JsonDict
from rayrl.traces.schema import is_complete

TRACES = "traces.jsonl"
PRIVATE = "private.jsonl"
TRAINING = "training.jsonl"
MAX_GROUP = 512


@dataclass(frozen=True)
class TraceLine:
    """One finished attempt as bytes, ready to append (no newline inside)."""

    record: bytes
    private: bytes | None = None
    training: bytes | None = None


class RunLock:
    """Exclusive hold on a run directory; refuses a second process at once."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._lock = FileLock(str(run_dir / ".lock"), mode=0o644)

    def __enter__(self) -> RunLock:
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RunConflictError(
                f"{self.run_dir} is in use by another process; wait for it, or give this run another experiment.name"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{self.run_dir} cannot be written ({error.strerror or error}); choose another experiment.run_root"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class TraceWriter:
    """Appends finished attempts durably from a thread of its own (call it with the run's lock held).

    ``append`` returns at once; ``flush`` waits until everything appended so far is on disk. A disk failure surfaces in
    the next ``append``, ``flush`` or ``close``: nothing is dropped in silence.
    """

    def __init__(self, run_dir: Path, *, on_commit: Callable[[int], None] | None = None) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._files = {
            TRACES: _open_append(run_dir / TRACES, 0o644),
            PRIVATE: _open_append(run_dir / PRIVATE, 0o600),
        }
        self._run_dir = run_dir
        # bounded: if the disk cannot keep up, the producer waits instead of memory growing
        self._queue: queue.Queue[TraceLine | threading.Event | None] = queue.Queue(maxsize=4096)
        self._failure: BaseException | None = None
        self._on_commit = on_commit
        self.bytes_written = 0
        self.commits = 0
        self._thread = threading.Thread(target=self._work, name="trace-writer", daemon=True)
        self._thread.start()

    def append(self, line: TraceLine) -> None:
        """Queue one attempt.

        Raises:
            DataError: the disk failed before, or the writer is closed.
        """
        self._check()
        if not self._thread.is_alive():
            raise DataError(f"traces cannot be written to {self._run_dir}: the writer is closed")
        self._queue.put(line)

    def flush(self) -> None:
        """Wait until all that was appended before is durable."""
        done = threading.Event()
        self._queue.put(done)
        while not done.wait(0.5):
            self._check()
            if not self._thread.is_alive():
                break
        self._check()

    def close(self) -> None:
        """Flush and release the files. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        for fd in self._files.values():
            os.close(fd)
        self._files = {}
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise DataError(f"traces cannot be written to {self._run_dir}: {self._failure}") from self._failure

    def _work(self) -> None:
        stop = False
        while not stop:
            group: list[TraceLine] = []
            waiters: list[threading.Event] = []
            item: TraceLine | threading.Event | None = self._queue.get()
            while True:
                if item is None:
                    stop = True
                elif isinstance(item, threading.Event):
                    waiters.append(item)
                else:
                    group.append(item)
                if stop or len(group) >= MAX_GROUP:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            try:
                if group and self._failure is None:
                    self._commit(group)
            except BaseException as failure:
                self._failure = failure
            for waiter in waiters:
                waiter.set()

    def _commit(self, group: list[TraceLine]) -> None:
        private = b"".join(line.private + b"\n" for line in group if line.private)
        training = b"".join(line.training + b"\n" for line in group if line.training)
        if training and TRAINING not in self._files:
            self._files[TRAINING] = _open_append(self._run_dir / TRAINING, 0o644)
        for name, data in ((PRIVATE, private), (TRAINING, training)):
            if data:
                _write_all(self._files[name], data)
                os.fsync(self._files[name])
        data = b"".join(line.record + b"\n" for line in group)
        _write_all(self._files[TRACES], data)
        os.fsync(self._files[TRACES])
        self.bytes_written += len(data)
        self.commits += 1
        if self._on_commit is not None:
            self._on_commit(len(group))


def _open_append(path: Path, mode: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode)
    os.fchmod(fd, mode)
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        _write_all(fd, b"\n")  # ends a torn tail, so that the next record starts on a line of its own
    return fd


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@dataclass
class ScanReport:
    """What a pass over a trace file met."""

    records: int = 0
    complete: int = 0
    failed: int = 0
    cancelled: int = 0
    malformed_lines: int = 0
    foreign_schema: int = 0
    duplicates: int = 0
    """Complete records beyond the first of their episode."""
    attempts_beyond_first: int = 0
    torn_tail: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    complete_ids: set[str] = field(default_factory=set)
    duplicate_ids: list[str] = field(default_factory=list)
    last_attempt: dict[str, int] = field(default_factory=dict)
    """Highest attempt number seen per episode that is not complete."""


def iter_lines(path: Path, *, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Lines that *begin* in ``[start, stop)``, without their newline; split on ``\\n`` bytes only."""
    if not path.exists():
        return
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            if file.read(1) != b"\n":
                file.readline()
        while stop is None or file.tell() < stop:
            line = file.readline()
            if not line:
                return
            yield line.rstrip(b"\n")


def is_episode(record: JsonDict) -> bool:
    """Whether an object is an episode record of the current schema (one without an id belongs to no episode)."""
    return record.get("schema") == EPISODE_SCHEMA and isinstance(record.get("episode_id"), str)


def parse_record(line: bytes) -> JsonDict | None:
    """The JSON object of a line, or ``None`` for a blank, torn or foreign line."""
    if not line:
        return None
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


class RunReader:
    """Streaming access to a run directory's records."""

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        self.traces = self.run_dir / TRACES

    def iter_records(self) -> Iterator[JsonDict]:
        """All records of the current schema, in file order."""
        for line in iter_lines(self.traces):
            record = parse_record(line)
            if record is not None and is_episode(record):
                yield record

    def results(self) -> Iterator[JsonDict]:
        """One record per episode: its first complete one in file order, then the newest failed one of the others.

        Two passes; only ids are kept in memory between them.
        """
        complete: set[str] = set()
        newest: dict[str, int] = {}
        for number, record in enumerate(self.iter_records()):
            name = record["episode_id"]
            if name in complete:
                continue
            if is_complete(record):
                complete.add(name)
                newest.pop(name, None)
                yield record
            else:
                newest[name] = number
        if newest:
            wanted = set(newest.values())
            for number, record in enumerate(self.iter_records()):
                if number in wanted:
                    yield record

    def find(self, episode_id: str, *, attempt: int | None = None) -> JsonDict:
        """The result of one episode, or a given attempt of it.

        Raises:
            DataError: there is none.
        """
        best: JsonDict | None = None
        needle = episode_id.encode()
        for line in iter_lines(self.traces):
            if needle not in line:
                continue
            record = parse_record(line)
            if record is None or not is_episode(record) or record["episode_id"] != episode_id:
                continue
            if attempt is not None:
                if record.get("attempt") == attempt:
                    return record
            elif is_complete(record):
                return record
            else:
                best = record
        if best is None or attempt is not None:
            which = f" attempt {attempt}" if attempt is not None else ""
            raise DataError(f"{self.traces}: holds no record of episode {episode_id!r}{which}")
        return best

    def scan(self) -> ScanReport:
        """One pass that counts everything; used by resume and ``rayrl traces verify``."""
        report = ScanReport()
        for line in iter_lines(self.traces):
            if not line:
                continue
            record = parse_record(line)
            if record is None:
                report.malformed_lines += 1
                continue
            if record.get("schema") != EPISODE_SCHEMA:
                report.foreign_schema += 1
                continue
            if not is_episode(record):
                report.malformed_lines += 1
                continue
            _count(report, record)
        report.torn_tail = _has_torn_tail(self.traces)
        return report

    def private_goals(self) -> dict[str, Any]:
        """Private goal by episode id (the newest one); for diagnosis and analysts only."""
        goals: dict[str, Any] = {}
        for line in iter_lines(self.run_dir / PRIVATE):
            record = parse_record(line)
            if record is not None and "goal" in record and "episode_id" in record:
                goals[record["episode_id"]] = record["goal"]
        return goals


def _count(report: ScanReport, record: JsonDict) -> None:
    report.records += 1
    name, attempt = record["episode_id"], int(record.get("attempt", 1))
    usage = record.get("usage") or {}
    report.prompt_tokens += int(usage.get("prompt_tokens") or 0)
    report.completion_tokens += int(usage.get("completion_tokens") or 0)
    if attempt > 1:
        report.attempts_beyond_first += 1
    if is_complete(record):
        if name in report.complete_ids:
            report.duplicates += 1
            report.duplicate_ids.append(name)
        else:
            report.complete += 1
            report.complete_ids.add(name)
            report.last_attempt.pop(name, None)
        return
    if record.get("status") == "cancelled":
        report.cancelled += 1
    else:
        report.failed += 1
    if name not in report.complete_ids:
        report.last_attempt[name] = max(attempt, report.last_attempt.get(name, 0))


def _has_torn_tail(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
