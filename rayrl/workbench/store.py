"""The store: one SQLite database (WAL) and a folder of content-addressed files.

Invariants:

* every write transaction begins with ``BEGIN IMMEDIATE``: a read that turns into a write fails at once otherwise,
  whatever the busy timeout is;
* files are written aside and renamed; their name is their digest, never a name from outside.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock
from sqlalchemy import Connection, Engine, create_engine, event, insert
from sqlalchemy.exc import DatabaseError

from rayrl.errors import DataError
from rayrl.schemas import JsonDict, sha256_hex
from rayrl.workbench import tables

HEAD = "0002"
BUSY_MS = 30_000


def now() -> str:
    """Time in UTC as ISO text."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_id(prefix: str) -> str:
    """``ds_1f0c...``: unique, and says what it names."""
    return f"{prefix}_{secrets.token_hex(8)}"


class MissingError(DataError):
    """What was named is not there."""


class Store:
    """Database and files under one folder. Safe to share between threads; each process opens its own.

    Raises:
        DataError: the folder cannot be made, or holds a database that is none, or of another version.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root).expanduser().resolve()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"the store {self.root} cannot be made: {error.strerror}; choose another root") from None
        self.engine = _engine(self.root / "workbench.db")
        try:
            self._migrate()
        except DatabaseError as error:
            raise DataError(
                f"the database {self.root / 'workbench.db'} cannot be used: {error.orig}; choose another root"
            ) from None

    def _migrate(self) -> None:
        with self.engine.connect() as connection:
            tables_there = connection.exec_driver_sql(
                "SELECT name FROM sqlite_master WHERE name='alembic_version'"
            ).all()
            if tables_there and connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar() == HEAD:
                return
        from alembic import command
        from alembic.config import Config
        from alembic.util import CommandError

        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
        with FileLock(str(self.root / "migrate.lock")), self.write() as connection:
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                raise DataError(
                    f"the store {self.root} is of another version of rayrl ({error}); use that version or another root"
                ) from None

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A snapshot of the database."""
        with self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A write transaction; committed on a clean exit."""
        with self.engine.connect().execution_options(rayrl_write=True) as connection, connection.begin():
            yield connection

    def close(self) -> None:
        """Release connections. Idempotent."""
        self.engine.dispose()

    def put_blob(self, data: bytes) -> str:
        """Keep bytes; returns their SHA-256."""
        digest = sha256_hex(data)
        path = self.blob(digest)
        if not path.exists():
            write_atomic(path, data)
        return digest

    def blob(self, digest: str) -> Path:
        """Where bytes of this digest lie (or would).

        Raises:
            DataError: no SHA-256.
        """
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise DataError("this is no SHA-256 digest")
        return self.root / "blobs" / digest[:2] / digest

    def note(self, connection: Connection, experiment_id: str, kind: str, data: JsonDict | None = None) -> None:
        """Append an event; it becomes visible with the transaction it belongs to."""
        row = {"experiment_id": experiment_id, "kind": kind, "data": data or {}, "created_at": now()}
        connection.execute(insert(tables.events).values(row))


def write_atomic(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write aside and rename, so that a reader sees all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".part-")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            if sync:
                os.fsync(out.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _engine(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_MS / 1000}, pool_size=8, max_overflow=40)

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions are ours
        for pragma in (f"busy_timeout={BUSY_MS}", "journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("PRAGMA cache_size=-32000")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("rayrl_write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine
