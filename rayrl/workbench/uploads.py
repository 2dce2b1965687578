"""Uploaded files: kept by digest, read in a child process, previewed under a profile without being saved."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects.sqlite import insert

from rayrl.errors import DataError
from rayrl.schemas import JsonDict
from rayrl.workbench import tables
from rayrl.workbench.mapping import (
    FieldRule,
    MappingProfile,
    apply_profile,
    drift,
    label_values,
    suggest,
    suggest_labels,
)
from rayrl.workbench.readers.child import FORMATS, guess_format, read_file
from rayrl.workbench.readers.rows import Limits, Options, Table
from rayrl.workbench.store import MissingError, Store, now

SAMPLE = 5000
"""Rows that suggestions are made from."""


class Uploads:
    """See the module docstring."""

    def __init__(self, store: Store, limits: Limits | None = None) -> None:
        self.store = store
        self.limits = limits or Limits()

    def add(self, file_name: str, data: bytes) -> JsonDict:
        """Keep a file; the same bytes again are the same upload. The name is only ever shown.

        Raises:
            DataError: empty or too large.
        """
        if not data:
            raise DataError("the file is empty")
        if len(data) > self.limits.max_bytes:
            raise DataError(
                f"the file has {len(data) / 1e6:.1f} MB; at most {self.limits.max_bytes / 1e6:.0f} MB are accepted"
            )
        digest = self.store.put_blob(data)
        row = {
            "sha256": digest,
            "file_name": "".join(c for c in file_name if c.isprintable())[:200] or "upload",
            "size": len(data),
            "format": guess_format(file_name, data),
            "created_at": now(),
        }
        with self.store.write() as connection:
            connection.execute(insert(tables.uploads).values(row).on_conflict_do_nothing())
        return self.get(digest)

    def get(self, digest: str) -> JsonDict:
        """One upload.

        Raises:
            DataError: there is none of this digest.
        """
        self.store.blob(digest)
        with self.store.read() as connection:
            row = connection.execute(select(tables.uploads).where(tables.uploads.c.sha256 == digest)).mappings().first()
        if row is None:
            raise MissingError(f"there is no upload {digest[:12]}...")
        return dict(row)

    def read(self, digest: str, options: Options, *, keep: int | None = None) -> Table:
        """Rows of an upload, or the first ``keep`` of them.

        Raises:
            DataError: see :func:`rayrl.workbench.readers.child.read_file`.
        """
        upload = self.get(digest)
        kind = options.format or upload["format"]
        if kind not in FORMATS:
            raise DataError(f"format {kind!r} is not known; use one of {', '.join(FORMATS)}")
        facts = {**asdict(options), "format": kind}
        return read_file(self.store.blob(digest), Options(**facts), self.limits, keep=keep)

    def preview(
        self,
        digest: str,
        options: Options,
        profile: MappingProfile | None,
        *,
        known: list[str] | None = None,
        rows: int = 20,
    ) -> JsonDict:
        """What the file holds, what a mapping could be, and what the given one makes of it; nothing is saved."""
        table = self.read(digest, options, keep=max(rows, SAMPLE) if profile is None else None)
        out: dict[str, Any] = {
            **table.head(),
            "suggested": suggest(table),
            "rows": table.rows[:rows],
            "places": table.places[:rows],
        }
        if profile is None and "gold_route" in out["suggested"]:
            rule = FieldRule(sources=[out["suggested"]["gold_route"]])
            out["suggested_labels"] = suggest_labels(label_values(table, rule))
        if profile is not None:
            if "gold_route" in profile.fields:
                out["suggested_labels"] = suggest_labels(label_values(table, profile.fields["gold_route"]))
            mapped = apply_profile(table, profile)
            out |= {
                "cases": [case.model_dump() for case in mapped.cases[:rows]],
                "n_cases": len(mapped.cases),
                "n_unlabelled": mapped.unlabelled,
                "n_errors": mapped.n_errors,
                "errors": mapped.errors,
            }
            if known is not None:
                out["drift"] = drift(known, table, profile)
        return out
