"""Data sets: immutable, versioned lists of cases made from an upload and a mapping profile (or from reviews).

For runners each data set has a file of inputs without labels (``inputs/<content hash>.jsonl``).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson
from sqlalchemy import Connection, func, insert, select

from rayrl.errors import DataError
from rayrl.schemas import JsonDict, canonical_json, sha256_hex
from rayrl.workbench import tables
from rayrl.workbench.cases import Case
from rayrl.workbench.mapping import MappingProfile, apply_profile
from rayrl.workbench.readers.rows import Options
from rayrl.workbench.store import MissingError, Store, new_id, now, write_atomic
from rayrl.workbench.uploads import Uploads

_D, _C, _M = tables.datasets, tables.cases, tables.mapping_profiles


class Datasets:
    """See the module docstring."""

    def __init__(self, store: Store, uploads: Uploads) -> None:
        self.store = store
        self.uploads = uploads

    def save_profile(self, name: str, profile: MappingProfile, columns: list[str]) -> JsonDict:
        """A new version of a mapping profile; the same content as the newest is that version."""
        body = profile.model_dump()
        digest = sha256_hex(canonical_json(body))
        with self.store.write() as connection:
            newest = (
                connection.execute(select(_M).where(_M.c.name == name).order_by(_M.c.version.desc())).mappings().first()
            )
            if newest is not None and newest["sha256"] == digest:
                return dict(newest)
            row = {
                "name": name,
                "version": (newest["version"] if newest else 0) + 1,
                "body": body,
                "columns": columns,
                "sha256": digest,
                "created_at": now(),
            }
            connection.execute(insert(_M).values(row))
        return row

    def profile(self, name: str, version: int | None = None) -> tuple[MappingProfile, JsonDict]:
        """A saved profile, the newest version unless one is named.

        Raises:
            DataError: there is none.
        """
        query = select(_M).where(_M.c.name == name).order_by(_M.c.version.desc())
        if version is not None:
            query = query.where(_M.c.version == version)
        with self.store.read() as connection:
            row = connection.execute(query).mappings().first()
        if row is None:
            raise MissingError(f"there is no mapping profile {name!r}" + (f" version {version}" if version else ""))
        return MappingProfile.model_validate(row["body"]), dict(row)

    def profiles(self) -> list[JsonDict]:
        """Every version of every profile."""
        with self.store.read() as connection:
            return [dict(r) for r in connection.execute(select(_M).order_by(_M.c.name, _M.c.version)).mappings()]

    def create(
        self,
        *,
        name: str,
        upload: str,
        options: Options,
        profile_name: str,
        profile_version: int | None = None,
        skip_errors: bool = False,
    ) -> JsonDict:
        """Freeze a data set.

        Raises:
            DataError: rows with errors (unless ``skip_errors``), or no case at all; the message lists the first rows.
        """
        profile, saved = self.profile(profile_name, profile_version)
        table = self.uploads.read(upload, options)
        mapped = apply_profile(table, profile)
        if mapped.n_errors and not skip_errors:
            lines = [
                f"  {e['place']}: {e['field']}{' ' if e['field'] else ''}{_shown(e['value'])}{e['message']}"
                for e in mapped.errors[:10]
            ]
            total = len(table.rows) + table.n_bad
            raise DataError(
                f"{mapped.n_errors} of {total} rows cannot be used:\n"
                + "\n".join(lines)
                + "\nmend them, or ask to leave them out (skip errors)"
            )
        if not mapped.cases:
            raise DataError("no row gives a case; look at the preview of the mapping")
        return self.freeze(
            name=name,
            cases=mapped.cases,
            classes=list(profile.labels),
            upload=upload,
            options=asdict(options),
            profile=(profile_name, saved["version"]),
            rejected=mapped.n_errors,
            warnings=table.warnings,
        )

    def freeze(
        self,
        *,
        name: str,
        cases: list[Case],
        classes: list[str],
        upload: str,
        options: JsonDict,
        profile: tuple[str, int],
        rejected: int = 0,
        warnings: list[str] | None = None,
        parent: str | None = None,
        notes: str = "",
    ) -> JsonDict:
        """Store cases as the next version of a data set. Equal content under the same name is the version it is."""
        content = sha256_hex(
            b"\n".join(canonical_json({**c.input(), "gold": c.gold_route, "domain": c.domain}) for c in cases)
        )
        with self.store.write() as connection:
            same = (
                connection.execute(
                    select(_D).where(
                        _D.c.name == name,
                        _D.c.content_sha256 == content,
                        _D.c.upload_sha256 == upload,
                        _D.c.profile_name == profile[0],
                        _D.c.profile_version == profile[1],
                        _D.c.classes == classes,
                    )
                )
                .mappings()
                .first()
            )
            if same is not None and parent is None:
                return dict(same)
            version = (connection.execute(select(func.max(_D.c.version)).where(_D.c.name == name)).scalar() or 0) + 1
            row: dict[str, Any] = {
                "id": new_id("ds"),
                "name": name,
                "version": version,
                "parent_id": parent,
                "upload_sha256": upload,
                "options": options,
                "profile_name": profile[0],
                "profile_version": profile[1],
                "content_sha256": content,
                "n_cases": len(cases),
                "n_labelled": sum(case.gold_route is not None for case in cases),
                "n_rejected": rejected,
                "classes": classes,
                "warnings": warnings or [],
                "notes": notes,
                "created_at": now(),
            }
            connection.execute(insert(_D).values(row))
            connection.execute(insert(_C), [_row(row["id"], n, case) for n, case in enumerate(cases)])
        return row

    def inputs_file(self, dataset: JsonDict) -> str:
        """Path of the file runners read: inputs only, one JSON line per case in order."""
        path = self.store.root / "inputs" / f"{dataset['id']}.jsonl"
        if not path.exists():
            lines = [orjson.dumps(case.input()) for case in self.cases(dataset["id"])]
            write_atomic(path, b"\n".join(lines) + b"\n")
        return str(path)

    def get(self, dataset_id: str) -> JsonDict:
        """One data set.

        Raises:
            DataError: there is none of this id.
        """
        with self.store.read() as connection:
            return get_dataset(connection, dataset_id)

    def all(self) -> list[JsonDict]:
        """All data sets, newest first."""
        with self.store.read() as connection:
            query = select(_D).order_by(_D.c.created_at.desc(), _D.c.version.desc())
            return [dict(r) for r in connection.execute(query).mappings()]

    def cases(self, dataset_id: str, *, start: int = 0, limit: int | None = None) -> list[Case]:
        """Cases in order."""
        query = (
            select(_C).where(_C.c.dataset_id == dataset_id, _C.c.ordinal >= start).order_by(_C.c.ordinal).limit(limit)
        )
        with self.store.read() as connection:
            return [case_of(dict(row)) for row in connection.execute(query).mappings()]

    def case(self, dataset_id: str, ordinal: int) -> Case:
        """One case.

        Raises:
            DataError: there is none at this position.
        """
        found = self.cases(dataset_id, start=ordinal, limit=1)
        with self.store.read() as connection:
            query = select(_C.c.ordinal).where(_C.c.dataset_id == dataset_id, _C.c.ordinal == ordinal)
            if not found or connection.execute(query).first() is None:
                raise MissingError(f"data set {dataset_id} has no case {ordinal}")
        return found[0]


def get_dataset(connection: Connection, dataset_id: str) -> JsonDict:
    """One data set of an open connection.

    Raises:
        DataError: there is none of this id.
    """
    row = connection.execute(select(_D).where(_D.c.id == dataset_id)).mappings().first()
    if row is None:
        raise MissingError(f"there is no data set {dataset_id!r}")
    return dict(row)


def _shown(value: Any) -> str:
    return "" if value in (None, "") else f"{str(value)[:60]!r}: "


def _row(dataset_id: str, ordinal: int, case: Case) -> dict[str, Any]:
    body = {
        "history": case.history,
        "context": case.context,
        "metadata": case.metadata,
        "source_row": case.source_row,
        "source_place": case.source_place,
    }
    return {
        "dataset_id": dataset_id,
        "ordinal": ordinal,
        "case_id": case.case_id,
        "query": case.query,
        "gold": case.gold_route,
        "domain": case.domain,
        "request_id": case.request_id,
        "input_sha256": case.input_sha256(),
        "body": body,
    }


def case_of(row: JsonDict) -> Case:
    """A case out of its table row."""
    return Case(
        case_id=row["case_id"],
        query=row["query"],
        gold_route=row["gold"],
        domain=row["domain"],
        request_id=row["request_id"],
        **row["body"],
    )
