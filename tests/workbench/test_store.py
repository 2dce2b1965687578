"""Migrations lead to the tables the code uses; files and writes keep their promises."""

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import insert

from rayrl.errors import ConfigError, DataError
from rayrl.workbench import tables
from rayrl.workbench.store import MissingError, Store


def test_migrations_lead_to_the_declared_tables(tmp_path):
    store = Store(tmp_path)
    with store.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []


def test_an_older_store_is_brought_up_to_date_on_opening(tmp_path):
    store = Store(tmp_path)
    with store.write() as connection:
        connection.exec_driver_sql("DROP INDEX cases_by_text")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num='0001'")
    store.close()
    with Store(tmp_path).read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []


def test_places_that_cannot_be_a_store_are_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="cannot be made: File exists"):
        Store(tmp_path / "file")
    (tmp_path / "workbench.db").write_bytes(b"no database" * 1000)
    with pytest.raises(DataError, match="file is not a database"):
        Store(tmp_path)


def test_store_of_another_version_is_refused(tmp_path):
    store = Store(tmp_path)
    with store.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num='9999'")
    with pytest.raises(DataError, match="of another version of rayrl"):
        Store(tmp_path)


def test_failed_write_leaves_nothing(tmp_path):
    store = Store(tmp_path)
    row = {"experiment_id": "e", "kind": "k", "data": {}, "created_at": "t"}
    with pytest.raises(RuntimeError), store.write() as connection:
        connection.execute(insert(tables.events).values(row))
        raise RuntimeError
    with store.read() as connection:
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM events").scalar() == 0
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


def test_blobs_are_named_by_content_and_nothing_else(tmp_path):
    store = Store(tmp_path)
    digest = store.put_blob(b"x")
    assert store.put_blob(b"x") == digest and store.blob(digest).read_bytes() == b"x"
    for name in ("../../x", "A" * 64, "", "0" * 63):
        with pytest.raises(DataError, match="no SHA-256"):
            store.blob(name)


def test_profiles_are_versioned_by_content(bench):
    body = {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "name": "m"}
    assert bench.models.save("m", body)["version"] == bench.models.save("m", body)["version"] == 1
    assert bench.models.save("m", {**body, "temperature": 0.5})["version"] == 2
    assert bench.models.get("m", 1)["body"].get("temperature") is None
    with pytest.raises(MissingError, match="no model profile 'n'"):
        bench.models.get("n")
    with pytest.raises(ConfigError, match="names code"):
        bench.models.save("evil", {"kind": "os:system"})
